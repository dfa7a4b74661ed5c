"""The draftability law: how far a draft is accepted, as a function of the target's next-token entropy.

A round of entropy ``H`` (nats, at the round's root) accepts a run of draft tokens, each with the same probability p:

    logit p = b0 - b1 H,     E[a | H] = p / (1 - p),     or p (1 - p^L) / (1 - p) where a block reaches L offsets

Conventions that decide numbers: ``accepted`` leaves the bonus out. A round with ``accepted == cap`` is right-censored:
it adds p^cap to the likelihood and no failure; without ``cap`` every run is taken to have ended in a rejection. A round
cut at a stop token or at the limit says nothing about the draft: ``truncated=`` leaves it out. Bins are quantiles of
entropy, and equal entropies share one, so heavy ties give fewer. With ``groups=`` (the prompt of each round) errors and
intervals come from a bootstrap over groups; without, from the information matrix and Fisher's z, which take rounds as
independent, as the p-value of the rank correlation always does. Data whose likelihood has no finite maximum (too few
rounds, constant entropy, separable) raise ValueError; a fit that exists but rests on too little carries the reason in
``degenerate``, and ``holds`` then says no.

What it does not know: why. A law that holds on pooled tasks may hold in none of them, and the other way round.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

import numpy as np

MIN_ROUNDS, SOUND_ROUNDS = 10, 50  # the least that is fitted; the least that holds() accepts: five rounds per decile
CURVE_FLOOR, CEILING_SHARE = 0.8, 0.5  # the fit clears r2_curve >= 0.8, or r2_round >= half of r2_ceiling
DECILES, CEILING_BINS = 10, 20
CELLS = 1024  # the bootstrap's grid: entropies within a thousandth of their range count as equal
Z95 = 1.959963984540054


@dataclass(frozen=True)
class DraftabilityLaw:
    """A fitted law; make one with `fit`. Fields ending in ``_ci`` are 95% intervals.

    >>> rng = np.random.default_rng(0)
    >>> entropy = rng.exponential(1.0, 4000)
    >>> accepted = np.minimum(rng.geometric(1 / (1 + np.exp(2.0 - entropy))) - 1, 15)
    >>> law = DraftabilityLaw.fit(entropy, accepted, cap=15)
    >>> round(law.b0, 1), round(law.b1, 1), law.holds()[0]
    (2.0, 1.0, True)
    >>> law.expected([0.0, 2.0]).round().tolist(), round(float(law.p(2.0)), 1)
    ([6.0, 1.0], 0.5)
    """

    b0: float
    b1: float
    se_b0: float
    se_b1: float
    rho: float  # Spearman's, with ties; 0 where accepted does not vary, as the three r2 are
    rho_p: float
    r2_round: float  # of single rounds
    r2_curve: float  # of decile means
    r2_ceiling: float  # what any function of entropy could reach on single rounds, the number of bins corrected for
    b0_ci: tuple[float, float]
    b1_ci: tuple[float, float]
    rho_ci: tuple[float, float]
    n: int  # rounds fitted
    n_truncated: int
    n_groups: int
    n_boot: int  # resamples that had a fit
    cap: int | None
    degenerate: str  # what is wrong, or ""

    @classmethod
    def fit(cls, entropy, accepted, *, cap=None, groups=None, truncated=None, n_boot=1000, seed=0) -> DraftabilityLaw:
        """Fit by maximum likelihood of the geometric run, right-censored at ``cap``.

        Args:
            entropy, accepted: one per round: nats, and draft tokens accepted without the bonus.
            cap: the farthest a round can accept (block size - 1); None if nothing but a rejection ends a run.
            groups: what the bootstrap draws, one per round: the prompt's index, or (task, prompt).
            truncated: True for each round to leave out.

        Raises:
            ValueError: for what is not such data, and for data without a finite fit.
        """
        h, a, groups, n_truncated = _checked(entropy, accepted, cap, groups, truncated)
        failed = np.ones_like(a) if cap is None else (a < cap).astype(float)
        x = (h - h.mean()) / h.std()
        if not _overlap(x, a[None], failed[None])[0]:
            why = "entropy separates accepted from rejected tokens" if a.any() else "no draft token was accepted"
            why = why if failed.any() else "every round reached the cap"
            raise ValueError(f"no finite fit: {why} in {len(h)} rounds; give more rounds, or a better or longer draft")
        theta, cov = _maximise(x, a[None], failed[None], np.zeros((1, 2)))
        if not np.isfinite(theta).all():
            raise ValueError(
                f"no finite fit: entropy all but separates accepted from rejected tokens in {len(h)} rounds"
            )
        back = np.array([[1, -h.mean() / h.std()], [0, -1 / h.std()]])  # coefficients of x -> (b0, b1)
        coef, se = back @ theta[0], np.sqrt(np.diag(back @ cov[0] @ back.T))
        coef_ci = coef + Z95 * se * np.array([[-1], [1]])
        ranks = [_midranks(values) - (len(h) + 1) / 2 for values in (h, a)]
        rho = _correlate(*ranks, np.zeros(len(h), int), np.ones((1, 1)))[0]
        rho_ci = np.tanh(np.arctanh(0.9999999999 * rho) + Z95 / np.sqrt(len(h) - 3) * np.array([-1, 1]))
        degenerate, n_groups, done = _degenerate(h, a), 0, 0
        if groups is not None:
            n_groups = int(groups.max()) + 1
            drawn = np.random.default_rng(seed).multinomial(n_groups, np.full(n_groups, 1 / n_groups), size=n_boot)
            draws = _refit(x, a, failed, groups, drawn.astype(float), theta) @ back.T
            done, rho_ci = len(draws), np.quantile(_correlate(*ranks, groups, drawn), [0.025, 0.975])
            if done > 1:
                se, coef_ci = draws.std(0, ddof=1), np.quantile(draws, [0.025, 0.975], axis=0)
            if done < 0.9 * n_boot:
                degenerate = degenerate or f"only {done} of {n_boot} resamples of {n_groups} groups have a finite fit"
        r2 = _explained(h, a, _expected(coef[0] - coef[1] * h, cap))
        numbers = map(float, (*coef, *se, rho, _spearman_p(rho, len(h)), *r2))
        intervals = (tuple(map(float, ci)) for ci in (*coef_ci.T, rho_ci))
        return cls(*numbers, *intervals, len(h), n_truncated, n_groups, done, cap and int(cap), degenerate)

    def p(self, entropy) -> np.ndarray:
        """Return the probability that the next draft token is accepted; the shape of ``entropy``."""
        return np.exp(-np.logaddexp(0, self.b1 * np.asarray(entropy, float) - self.b0))

    def expected(self, entropy) -> np.ndarray:
        """Return the expected accepted length, without the bonus; the exact finite form where there is a cap."""
        return _expected(self.b0 - self.b1 * np.asarray(entropy, float), self.cap)

    def holds(self, alpha: float = 0.05) -> tuple[bool, dict[str, bool]]:
        """Say whether the law holds, and which of its four conditions do.

        The slope is positive: b1's interval lies above 0. Ranks fall: rho < 0 with p < ``alpha``, its interval below 0.
        The fit clears: r2_curve is at least 0.8, or r2_round half of a positive r2_ceiling. Nothing is degenerate.
        """
        half_the_ceiling = self.r2_ceiling > 0 and self.r2_round >= CEILING_SHARE * self.r2_ceiling
        conditions = {
            "slope_positive": self.b1_ci[0] > 0,
            "rank_negative": self.rho < 0 and self.rho_p < alpha and self.rho_ci[1] < 0,
            "fit_clears": self.r2_curve >= CURVE_FLOOR or half_the_ceiling,
            "not_degenerate": not self.degenerate,
        }
        return all(conditions.values()), conditions

    def to_dict(self) -> dict:
        """Return plain values for JSON, with the verdict and its conditions."""
        verdict, conditions = self.holds()
        return {**asdict(self), "holds": verdict, "conditions": conditions}

    @classmethod
    def from_dict(cls, record: dict) -> DraftabilityLaw:
        """Return the law that `to_dict` wrote; other keys are ignored."""
        values = {f.name: record[f.name] for f in fields(cls)}
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})

    def __repr__(self) -> str:
        cap, verdict = "" if self.cap is None else f", cap {self.cap}", "holds" if self.holds()[0] else "does not hold"
        r2 = f"r2 round {self.r2_round:.3f} curve {self.r2_curve:.3f} ceiling {self.r2_ceiling:.3f}"
        line = f"logit p = {self.b0:.3f} - {self.b1:.3f} H{cap}; n {self.n}; rho {self.rho:.3f}; {r2}; {verdict}"
        return f"DraftabilityLaw({line}{self.degenerate and f' ({self.degenerate})'})"


def decile_table(entropy, accepted, bins: int = DECILES) -> dict[str, np.ndarray]:
    """Return the rounds binned by quantiles of entropy: mean ``entropy`` and ``accepted``, ``count``; lowest first.

    >>> table = decile_table([0.1, 0.3, 1.0, 2.0], [4, 2, 1, 0], bins=2)
    >>> table["entropy"].tolist(), table["accepted"].tolist(), table["count"].tolist()
    ([0.2, 1.5], [3.0, 0.5], [2, 2])
    """
    entropy, accepted, _, _ = _checked(entropy, accepted, None, None, None, least=1)
    which, count = _bins(entropy, bins)
    entropy, accepted = (np.bincount(which, values) / count for values in (entropy, accepted))
    return {"entropy": entropy, "accepted": accepted, "count": count}


def _checked(entropy, accepted, cap, groups, truncated, least=MIN_ROUNDS):
    h, a = np.asarray(entropy, float), np.asarray(accepted, float)
    keep = ~np.asarray(np.zeros(h.shape) if truncated is None else truncated, bool)
    groups = groups.tolist() if hasattr(groups, "tolist") else groups
    sizes = {"accepted": a.shape, "truncated": keep.shape, "groups": h.shape if groups is None else (len(groups),)}
    for name, size in sizes.items():
        if h.ndim != 1 or size != h.shape:
            raise ValueError(f"one value per round: entropy has shape {h.shape}, {name} {size}")
    h, a = h[keep], a[keep]
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


def _overlap(x, wins, losses):  # (C,), (R, C), (R, C) -> (R,): a finite maximum exists iff neither side lies beyond
    low = [np.where(count > 0, x, np.inf).min(1) for count in (wins, losses)]
    high = [np.where(count > 0, x, -np.inf).max(1) for count in (wins, losses)]
    return (high[0] > low[1]) & (high[1] > low[0])


def _degenerate(h, a) -> str:
    if len(h) < SOUND_ROUNDS:
        return f"{len(h)} rounds, fewer than {SOUND_ROUNDS}"
    for name, values in (("entropy", h), ("accepted", a)):
        if (share := np.unique(values, return_counts=True)[1].max() / len(h)) > 0.95:
            return f"{share:.1%} of rounds share one value of {name}"
    return ""


def _expected(eta, cap):
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
        weight, residual = trials * p * (1 - p), wins - trials * p
        i00, i01, i11 = weight.sum(1), weight @ x, weight @ (x * x)
        det = i00 * i11 - i01 * i01
        det = np.where(det > 1e-10 * i00 * i11, det, np.nan)[:, None, None]  # below: rounding, not curvature
        cov = np.stack([i11, -i01, -i01, i00], 1).reshape(-1, 2, 2) / det
        step = np.einsum("rij,jr->ri", cov, [residual.sum(1), residual @ x])
        if not (np.abs(step) >= 1e-9).any():
            break
        while (worse := (new := loglik(theta + step)) < value - 1e-12 * np.abs(value)).any():
            step[worse] /= 2
        theta, value = theta + step, new
    return np.where(np.abs(step) < 1e-9, theta, np.nan), cov


def _refit(x, wins, losses, groups, drawn, theta):  # drawn (R, G): how often a resample holds a group; -> (<= R, 2)
    _, cell = np.unique((CELLS * (x - x.min()) / np.ptp(x)).astype(int), return_inverse=True)
    trials, cells = wins + losses, cell.max() + 1
    centres = np.bincount(cell, x * trials) / np.bincount(cell, trials)
    tables = (np.bincount(groups * cells + cell, n, drawn.shape[1] * cells) for n in (wins, losses))  # (G * C,)
    wins, losses = (drawn @ table.reshape(-1, cells) for table in tables)  # (R, C)
    ok = _overlap(centres, wins, losses)
    if not ok.any():
        return theta[:0]
    thetas, _ = _maximise(centres, wins[ok], losses[ok], np.repeat(theta, ok.sum(), 0))
    return thetas[np.isfinite(thetas).all(1)]


def _bins(h, bins):
    edges = np.unique(np.quantile(h, np.arange(1, bins) / bins))
    return np.unique(np.searchsorted(edges, h), return_inverse=True, return_counts=True)[1:]


def _explained(h, a, fitted) -> tuple[float, float, float]:
    n, total = len(h), ((a - a.mean()) ** 2).sum()
    if total == 0:
        return 0.0, 0.0, 0.0
    which, count = _bins(h, DECILES)
    mean, law = (np.bincount(which, values) / count for values in (a, fitted))
    curve = 1 - (count * (mean - law) ** 2).sum() / max((count * (mean - a.mean()) ** 2).sum(), 1e-12 * total)
    which, count = _bins(h, min(CEILING_BINS, n // 5))
    within = ((a - (np.bincount(which, a) / count)[which]) ** 2).sum() / (n - len(count))
    return 1 - ((a - fitted) ** 2).sum() / total, curve, max(0.0, 1 - within / (total / (n - 1)))


def _midranks(values):
    _, which, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[which]


def _correlate(u, v, groups, drawn):  # drawn (R, G) -> (R,); 0 where one side does not vary
    n, u, v, uu, vv, uv = (drawn @ np.bincount(groups, m) for m in (np.ones_like(u), u, v, u * u, v * v, u * v))
    spread = np.maximum(n * uu - u * u, 0) * np.maximum(n * vv - v * v, 0)
    return np.clip((n * uv - u * v) / np.sqrt(np.where(spread > 0, spread, np.inf)), -1, 1)


def _spearman_p(rho: float, n: int) -> float:
    """Return the two-sided p-value under the t approximation, whose density in z = artanh(rho) is sech(z)^(n-2)."""
    start, df = math.atanh(min(abs(rho), 1 - 1e-15)), n - 2
    stop = math.acosh(math.exp(math.log(math.cosh(start)) + 40 / df))  # e^-40 of the density is left beyond
    nodes, weights = np.polynomial.legendre.leggauss(100)
    density = -df * np.log(np.cosh(start + (stop - start) * (nodes + 1) / 2))
    whole = math.lgamma(df / 2) - math.lgamma((df + 1) / 2) + math.log(math.pi) / 2 - math.log(2)
    return (stop - start) / 2 * weights @ np.exp(density - whole)
