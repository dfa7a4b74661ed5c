"""The draftability law: how far a draft is accepted, as a function of the target's next-token entropy.

The law is a statement about the mean accepted length of a round of entropy ``H`` (nats, at the round's root):

    logit p = b0 - b1 H,     E[a | H] = p / (1 - p),     or p (1 - p^L) / (1 - p) where a block reaches L offsets

There are two fits. ``fit="mean"``, the default, minimises the squared error of accepted length against this mean, and
asks nothing of how single tokens are accepted. ``fit="geometric"`` asks for more: that every token of a round is accepted
with the same chance p, independently. It maximises that likelihood. Where the two part, the chance is not constant along
the block.

Conventions that decide numbers: ``accepted`` leaves the bonus out. ``cap`` is L, the farthest a round can accept: the mean
fit takes the finite form with it, and the geometric fit counts a round with ``accepted == cap`` as right-censored (it adds
p^cap to the likelihood and no failure). Without ``cap`` a block has no end. A round cut at a stop token or at the limit
says nothing about the draft: ``truncated=`` leaves it out. Bins are quantiles of
entropy, and equal entropies share one, so heavy ties give fewer. With ``groups=`` (the prompt of each round) errors and
intervals come from a bootstrap over groups. Without, rounds are taken as independent: errors come from the sandwich
estimator (mean) or the information matrix (geometric), and the rank correlation's interval from Fisher's z; its p-value
always takes rounds as independent. Data without a finite optimum (too few rounds, constant entropy, separable) raise
ValueError; a fit that exists but rests on too little carries the reason in
``degenerate``, and ``holds`` then says no.

What it does not know: why. A law that holds on pooled tasks may hold in none of them, and the other way round.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np

from glance.estimate import (
    DECILES,
    FITS,
    Z95,
    checked_rounds,
    correlate,
    degenerate_reason,
    expected_length,
    explained_shares,
    fit_geometric,
    fit_mean,
    midranks,
    quantile_bins,
    refit_geometric,
    refit_mean,
    spearman_p,
    unfit,
)

CURVE_FLOOR = 0.8  # the fit clears r2_curve >= this,
CEILING_SHARE = 0.5  # or r2_round >= this share of r2_ceiling


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
    fitted: str = "mean"  # which of FITS gave the numbers

    @classmethod
    def fit(
        cls, entropy, accepted, *, cap=None, groups=None, truncated=None, fit="mean", n_boot=1000, seed=0
    ) -> DraftabilityLaw:
        """Fit the law to rounds: to their mean, or as a geometric run.

        Args:
            entropy, accepted: one per round: nats, and draft tokens accepted without the bonus.
            cap: the farthest a round can accept (block size - 1); None if nothing but a rejection ends a run.
            groups: what the bootstrap draws, one per round: the prompt's index, or (task, prompt).
            truncated: True for each round to leave out.
            fit: "mean" minimises the squared error of accepted length; "geometric" maximises the likelihood of tokens
                that are accepted independently with one chance per round, right-censored at ``cap``.

        Raises:
            ValueError: for what is not such data, and for data without a finite fit.
        """
        if fit not in FITS:
            raise ValueError(f"fit={fit!r} must be one of {', '.join(FITS)}")
        h, a, groups, n_truncated = checked_rounds(entropy, accepted, cap, groups, truncated)
        failed = np.ones_like(a) if cap is None else (a < cap).astype(float)
        x = (h - h.mean()) / h.std()
        if not a.any():
            raise unfit("no draft token was accepted", h)
        if not failed.any():
            raise unfit("every round reached the cap", h)
        theta, cov = fit_mean(x, a, cap) if fit == "mean" else fit_geometric(x, a, failed)
        if not np.isfinite(theta).all():
            raise unfit("entropy all but separates accepted from rejected tokens", h)
        back = np.array([[1, -h.mean() / h.std()], [0, -1 / h.std()]])  # coefficients of x -> (b0, b1)
        coef = back @ theta
        se = np.sqrt(np.diag(back @ cov @ back.T))
        coef_ci = coef + Z95 * se * np.array([[-1], [1]])
        ranks = [midranks(values) - (len(h) + 1) / 2 for values in (h, a)]
        rho = correlate(*ranks, np.zeros(len(h), int), np.ones((1, 1)))[0]
        rho_ci = np.tanh(np.arctanh(0.9999999999 * rho) + Z95 / np.sqrt(len(h) - 3) * np.array([-1, 1]))
        degenerate = degenerate_reason(h, a)
        n_groups = 0
        done = 0
        if groups is not None:
            n_groups = int(groups.max()) + 1
            drawn = np.random.default_rng(seed).multinomial(n_groups, np.full(n_groups, 1 / n_groups), size=n_boot)
            if fit == "mean":
                draws = refit_mean(x, a, cap, groups, drawn.astype(float), theta) @ back.T
            else:
                draws = refit_geometric(x, a, failed, groups, drawn.astype(float), theta) @ back.T
            done = len(draws)
            rho_ci = np.quantile(correlate(*ranks, groups, drawn), [0.025, 0.975])
            if done > 1:
                se = draws.std(0, ddof=1)
                coef_ci = np.quantile(draws, [0.025, 0.975], axis=0)
            if done < 0.9 * n_boot:
                degenerate = degenerate or f"only {done} of {n_boot} resamples of {n_groups} groups have a finite fit"
        r2 = explained_shares(h, a, expected_length(coef[0] - coef[1] * h, cap))
        numbers = map(float, (*coef, *se, rho, spearman_p(rho, len(h)), *r2))
        intervals = (tuple(map(float, ci)) for ci in (*coef_ci.T, rho_ci))
        return cls(*numbers, *intervals, len(h), n_truncated, n_groups, done, cap and int(cap), degenerate, fit)

    def p(self, entropy) -> np.ndarray:
        """Return the probability that the next draft token is accepted; the shape of ``entropy``."""
        return np.exp(-np.logaddexp(0, self.b1 * np.asarray(entropy, float) - self.b0))

    def expected(self, entropy) -> np.ndarray:
        """Return the expected accepted length, without the bonus; the exact finite form where there is a cap."""
        return expected_length(self.b0 - self.b1 * np.asarray(entropy, float), self.cap)

    def holds(self, alpha: float = 0.05) -> tuple[bool, dict[str, bool]]:
        """Say whether the law holds by this fit (``fitted`` names it), and which of its four conditions do.

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
        """Return the law that `to_dict` wrote; other keys are ignored.

        Raises:
            ValueError: a record that lacks a number; names it.
        """
        if lacking := [f.name for f in fields(cls) if f.name not in record]:
            raise ValueError(f"the record of a law lacks {', '.join(lacking)}: fit it again")
        values = {f.name: record[f.name] for f in fields(cls)}
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})

    def __repr__(self) -> str:
        cap = "" if self.cap is None else f", cap {self.cap}"
        verdict = "holds" if self.holds()[0] else "does not hold"
        r2 = f"r2 round {self.r2_round:.3f} curve {self.r2_curve:.3f} ceiling {self.r2_ceiling:.3f}"
        line = (
            f"{self.fitted} fit: logit p = {self.b0:.3f} - {self.b1:.3f} H{cap}; n {self.n}; rho {self.rho:.3f}; {r2}"
        )
        return f"DraftabilityLaw({line}; {verdict}{self.degenerate and f' ({self.degenerate})'})"


def decile_table(entropy, accepted, bins: int = DECILES) -> dict[str, np.ndarray]:
    """Return the rounds binned by quantiles of entropy: mean ``entropy`` and ``accepted``, ``count``; lowest first.

    >>> table = decile_table([0.1, 0.3, 1.0, 2.0], [4, 2, 1, 0], bins=2)
    >>> table["entropy"].tolist(), table["accepted"].tolist(), table["count"].tolist()
    ([0.2, 1.5], [3.0, 0.5], [2, 2])
    """
    entropy, accepted, _, _ = checked_rounds(entropy, accepted, None, None, None, least=1)
    which, count = quantile_bins(entropy, bins)
    entropy, accepted = (np.bincount(which, values) / count for values in (entropy, accepted))
    return {"entropy": entropy, "accepted": accepted, "count": count}
