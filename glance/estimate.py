"""The numerics of the law's fits: least squares of the mean, the geometric likelihood, resamples, ranks and bins.

What the fits mean, and the conventions that decide numbers, stand in `glance.law`.

Shapes: R resamples, G groups, C cells of equal entropy.
"""

import math

import numpy as np

MIN_ROUNDS = 10  # the least that is fitted
SOUND_ROUNDS = 50  # the least that `holds` accepts: five rounds per decile
DECILES = 10
CEILING_BINS = 20
FITS = ("mean", "geometric")
START_SLOPES = (0.0, -1.0, 1.0, -4.0)  # of the mean fit, in standard deviations of entropy: the best end is taken
CELLS = 1024  # the bootstrap's grid: entropies within a thousandth of their range count as equal
Z95 = 1.959963984540054


def checked_rounds(entropy, accepted, cap, groups, truncated, least=MIN_ROUNDS):
    """Return entropies, accepted lengths and group codes of the rounds that were not cut, and how many were.

    Raises:
        ValueError: shapes that differ, too few rounds, values that cannot be, constant entropy, or one group alone.
    """
    h = np.asarray(entropy, float)
    a = np.asarray(accepted, float)
    keep = ~np.asarray(np.zeros(h.shape) if truncated is None else truncated, bool)
    groups = groups.tolist() if hasattr(groups, "tolist") else groups
    sizes = {"accepted": a.shape, "truncated": keep.shape, "groups": h.shape if groups is None else (len(groups),)}
    for name, size in sizes.items():
        if h.ndim != 1 or size != h.shape:
            raise ValueError(f"one value per round: entropy has shape {h.shape}, {name} {size}")
    h = h[keep]
    a = a[keep]
    if len(h) < least:
        raise ValueError(f"{len(h)} rounds ({(~keep).sum()} more were truncated); the law needs at least {least}")
    if not np.isfinite(h).all() or h.min() < -1e-3:  # fp32 rounding may leave a hair below zero
        raise ValueError(f"entropy must be finite and 0 or more (nats); it holds {h[~(h >= -1e-3) | np.isinf(h)][0]}")
    if not np.isfinite(a).all() or a.min() < 0 or (a % 1).any():
        raise ValueError("accepted must be whole numbers from 0: draft tokens of a round, without the bonus")
    if cap is not None and not (cap >= 1 and cap == int(cap) and a.max() <= cap):
        raise ValueError(f"cap={cap} must be a whole number, at least 1 and at least accepted (up to {a.max():.0f})")
    if least > 1 and np.ptp(h) <= 1e-9 * max(1.0, h.max()):
        raise ValueError(f"entropy is constant ({h[0]:.4g} in all {len(h)} rounds): no slope can be fitted")
    if groups is not None:
        names = [tuple(g) if isinstance(g, list) else g for g, kept in zip(groups, keep, strict=True) if kept]
        codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
        if len(codes) < 2:
            raise ValueError(f"groups name one prompt alone ({names[0]!r}); a bootstrap needs two, or groups=None")
        groups = np.array([codes[name] for name in names])
    return h, a, groups, int((~keep).sum())


def _overlap(x, wins, losses):
    """Say per resample (R,) whether a finite maximum exists: entropies of accepted and rejected tokens overlap."""
    low = [np.where(count > 0, x, np.inf).min(1) for count in (wins, losses)]
    high = [np.where(count > 0, x, -np.inf).max(1) for count in (wins, losses)]
    return (high[0] > low[1]) & (high[1] > low[0])


def degenerate_reason(h, a) -> str:
    """Say why a fit that exists rests on too little; "" where it does not."""
    if len(h) < SOUND_ROUNDS:
        return f"{len(h)} rounds, fewer than {SOUND_ROUNDS}"
    for name, values in (("entropy", h), ("accepted", a)):
        if (share := np.unique(values, return_counts=True)[1].max() / len(h)) > 0.95:
            return f"{share:.1%} of rounds share one value of {name}"
    return ""


def expected_length(eta, cap):
    """Return the law's mean accepted length at logit p = eta; the finite form where there is a cap."""
    eta = np.clip(eta, -500, 500)  # p / (1 - p) = exp(eta), 1 - p^L through expm1: p -> 1 gives L, not 0 / 0
    return np.exp(eta) if cap is None else -np.exp(eta) * np.expm1(-cap * np.logaddexp(0, -eta))


def _maximise(x, wins, losses, theta):
    """Run Newton with step halving on R logistic likelihoods: x (C,), counts (R, C), start (R, 2).

    Returns the maxima (R, 2), nan where the likelihood is too flat to find one, and their covariances (R, 2, 2).
    """
    trials = wins + losses

    def loglik(theta):
        eta = theta[:, :1] + theta[:, 1:] * x
        return (wins * eta - trials * np.logaddexp(0, eta)).sum(1)

    value = loglik(theta)
    for _ in range(60):
        p = np.exp(-np.logaddexp(0, -(theta[:, :1] + theta[:, 1:] * x)))
        weight = trials * p * (1 - p)
        residual = wins - trials * p
        i00 = weight.sum(1)
        i01 = weight @ x
        i11 = weight @ (x * x)
        det = i00 * i11 - i01 * i01
        det = np.where(det > 1e-10 * i00 * i11, det, np.nan)[:, None, None]  # below: rounding, not curvature
        cov = np.stack([i11, -i01, -i01, i00], 1).reshape(-1, 2, 2) / det
        step = np.einsum("rij,jr->ri", cov, [residual.sum(1), residual @ x])
        if not (np.abs(step) >= 1e-9).any():
            break
        while (worse := (new := loglik(theta + step)) < value - 1e-12 * np.abs(value)).any():
            step[worse] /= 2
        theta = theta + step
        value = new
    return np.where(np.abs(step) < 1e-9, theta, np.nan), cov


def unfit(why, h) -> ValueError:
    """Return the error for data without a finite fit."""
    return ValueError(f"no finite fit: {why} in {len(h)} rounds; give more rounds, or a better or longer draft")


def fit_geometric(x, a, failed):
    """Return the geometric fit's coefficients of x (2,), nan where there are none, and their covariance (2, 2)."""
    if not _overlap(x, a[None], failed[None])[0]:
        return np.full(2, np.nan), np.full((2, 2), np.nan)
    theta, cov = _maximise(x, a[None], failed[None], np.zeros((1, 2)))
    return theta[0], cov[0]


def fit_mean(x, a, cap):
    """Return the mean fit's coefficients of x (2,), nan where there are none, and the sandwich estimate (2, 2).

    The best of several starts counts. One that runs off to infinity and ends below all others is no fit.
    """
    level = _level(a.mean(), cap)
    starts = np.array([[level, slope] for slope in START_SLOPES])
    counts = np.ones((len(starts), len(x)))
    thetas, cost, sound = _least_squares(x, counts, np.repeat(a[None], len(starts), 0), starts, cap)
    near = cost <= cost.min() * (1 + 1e-9) + 1e-12
    if not (near & sound).any():
        return np.full(2, np.nan), np.full((2, 2), np.nan)
    theta = thetas[np.flatnonzero(near & sound)[0]]
    mean, slope = _mean_and_slope(theta[0] + theta[1] * x, cap)
    jacobian = slope[:, None] * np.stack([np.ones_like(x), x], 1)  # (n, 2)
    bread = np.linalg.inv(jacobian.T @ jacobian)
    meat = jacobian.T @ (jacobian * ((a - mean) ** 2)[:, None])
    return theta, len(x) / (len(x) - 2) * bread @ meat @ bread


def _level(mean, cap):  # the eta at which the expected length is `mean`, by bisection
    low = -50.0
    high = 50.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_length(middle, cap) < mean:
            low = middle
        else:
            high = middle
    return middle


def _mean_and_slope(eta, cap):
    """Return the expected length at eta and its derivative: with m = p (1 - p^L) / (1 - p), m' = m - L p^(L + 1)."""
    mean = expected_length(np.clip(eta, -300, 300), cap)
    if cap is None:
        return mean, mean
    return mean, np.maximum(mean - cap * np.exp(-(cap + 1) * np.logaddexp(0, -eta)), 0)


def _least_squares(x, counts, sums, theta, cap):
    """Run Levenberg-Marquardt on R weighted problems: x (C,), rounds and their accepted tokens per cell (R, C).

    Returns:
        The ends (R, 2); their squared error (R,), up to what no coefficients change; and which are minima (R,): there an
        undamped step stays put, which it does not on the flat way to infinity.
    """
    theta = theta.copy()
    damping = np.full(len(theta), 1e-3)
    sound = np.zeros(len(theta), bool)
    at = np.arange(len(theta))  # the problems still at work
    means = sums / np.where(counts > 0, counts, 1)

    def squared_error(theta, of):
        mean = _mean_and_slope(theta[:, :1] + theta[:, 1:] * x, cap)[0]
        return (counts[of] * (mean - means[of]) ** 2).sum(1)

    value = squared_error(theta, at)
    for _ in range(300):
        mean, slope = _mean_and_slope(theta[at, :1] + theta[at, 1:] * x, cap)
        weight = counts[at] * slope**2
        residual = slope * (sums[at] - counts[at] * mean)
        g0 = residual.sum(1)
        g1 = residual @ x
        i00 = weight.sum(1)
        i01 = weight @ x
        i11 = weight @ (x * x)
        whole = _solved(i00, i01, i11, g0, g1)
        grown = 1 + damping[at]
        step = np.nan_to_num(_solved(grown * i00, i01, grown * i11, g0, g1))  # nothing left to solve: it stays
        sound[at] = (np.abs(whole) < 1e-5).all(1)  # nan is not
        new = squared_error(theta[at] + step, at)
        better = new <= value[at]
        moved = at[better]
        theta[moved] += step[better]
        value[moved] = new[better]
        damping[at] *= np.where(better, 0.1, 10.0)
        done = (np.abs(step) < 1e-10).all(1) | (np.abs(whole) < 1e-10).all(1) | (damping[at] > 1e12)
        at = at[~done]
        if not len(at):
            break
    return theta, value, sound


def _solved(i00, i01, i11, g0, g1):  # R systems of two equations -> (R, 2); nan where rounding is all that is left
    det = i00 * i11 - i01 * i01
    det = np.where(det > 1e-10 * i00 * i11, det, np.nan)
    return np.stack([(i11 * g0 - i01 * g1) / det, (i00 * g1 - i01 * g0) / det], 1)


def _cells(x, weight, groups):  # cell of each round, the cells' centres by weight, and a function that sums per group
    _, cell = np.unique((CELLS * (x - x.min()) / np.ptp(x)).astype(int), return_inverse=True)
    n_cells = cell.max() + 1
    centres = np.bincount(cell, x * weight) / np.bincount(cell, weight)

    def summed(values, n_groups):
        return np.bincount(groups * n_cells + cell, values, n_groups * n_cells).reshape(n_groups, n_cells)

    return centres, summed


def refit_mean(x, a, cap, groups, drawn, theta):
    """Return the mean fit of each resample that has one (<= R, 2); drawn (R, G) says how often it holds a group."""
    centres, summed = _cells(x, np.ones_like(x), groups)
    counts = drawn @ summed(np.ones_like(x), drawn.shape[1])
    sums = drawn @ summed(a, drawn.shape[1])
    thetas, _, sound = _least_squares(centres, counts, sums, np.repeat(theta[None], len(drawn), 0), cap)
    return thetas[sound]


def refit_geometric(x, wins, losses, groups, drawn, theta):
    """Return the geometric fit of each resample that has one, as `refit_mean`."""
    centres, summed = _cells(x, wins + losses, groups)
    wins = drawn @ summed(wins, drawn.shape[1])  # (R, C)
    losses = drawn @ summed(losses, drawn.shape[1])
    ok = _overlap(centres, wins, losses)
    if not ok.any():
        return np.empty((0, 2))
    thetas, _ = _maximise(centres, wins[ok], losses[ok], np.repeat(theta[None], ok.sum(), 0))
    return thetas[np.isfinite(thetas).all(1)]


def quantile_bins(h, bins):
    """Return each round's bin by quantiles of entropy, and the bins' counts; equal entropies share one."""
    edges = np.unique(np.quantile(h, np.arange(1, bins) / bins))
    return np.unique(np.searchsorted(edges, h), return_inverse=True, return_counts=True)[1:]


def explained_shares(h, a, fitted) -> tuple[float, float, float]:
    """Return r2 of single rounds, of decile means, and the ceiling that any function of entropy could reach."""
    n = len(h)
    total = ((a - a.mean()) ** 2).sum()
    if total == 0:
        return 0.0, 0.0, 0.0
    which, count = quantile_bins(h, DECILES)
    mean, law = (np.bincount(which, values) / count for values in (a, fitted))
    curve = 1 - (count * (mean - law) ** 2).sum() / max((count * (mean - a.mean()) ** 2).sum(), 1e-12 * total)
    which, count = quantile_bins(h, min(CEILING_BINS, n // 5))
    within = ((a - (np.bincount(which, a) / count)[which]) ** 2).sum() / (n - len(count))
    return 1 - ((a - fitted) ** 2).sum() / total, curve, max(0.0, 1 - within / (total / (n - 1)))


def midranks(values):
    """Return ranks from 1, ties sharing their mean."""
    _, which, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[which]


def correlate(u, v, groups, drawn):
    """Return the correlation in each resample (R,), drawn (R, G); 0 where one side does not vary."""
    n, u, v, uu, vv, uv = (drawn @ np.bincount(groups, m) for m in (np.ones_like(u), u, v, u * u, v * v, u * v))
    spread = np.maximum(n * uu - u * u, 0) * np.maximum(n * vv - v * v, 0)
    return np.clip((n * uv - u * v) / np.sqrt(np.where(spread > 0, spread, np.inf)), -1, 1)


def spearman_p(rho: float, n: int) -> float:
    """Return the two-sided p-value under the t approximation, whose density in z = artanh(rho) is sech(z)^(n-2)."""
    start = math.atanh(min(abs(rho), 1 - 1e-15))
    df = n - 2
    stop = math.acosh(math.exp(math.log(math.cosh(start)) + 40 / df))  # e^-40 of the density is left beyond
    nodes, weights = np.polynomial.legendre.leggauss(100)
    density = -df * np.log(np.cosh(start + (stop - start) * (nodes + 1) / 2))
    whole = math.lgamma(df / 2) - math.lgamma((df + 1) / 2) + math.log(math.pi) / 2 - math.log(2)
    return (stop - start) / 2 * weights @ np.exp(density - whole)
