"""torch's Muon with the precision of its Newton-Schulz steps as a choice: torch 2.13 takes them in bfloat16 alone.

Source of the steps: Keller Jordan, https://kellerjordan.github.io/posts/muon/; the coefficients are torch's defaults.
"""

import torch


def orthogonalise(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return a matrix of the same singular vectors whose singular values are near one, in the matrix's own dtype."""
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class SingleMuon(torch.optim.Muon):
    """Muon whose Newton-Schulz steps are taken in the parameters' own dtype."""

    @torch.no_grad()
    def step(self, closure=None):
        """Take one step, as `torch.optim.Muon` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)
        return loss

    def _update(self, weight: torch.Tensor, group: dict) -> None:
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight.grad, memory_format=torch.preserve_format)
        momentum = group["momentum"]
        buffer = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
        update = weight.grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = orthogonalise(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"] * 0.2 * max(weight.shape) ** 0.5)  # "match_rms_adamw"


def build_muon(weights: list[torch.nn.Parameter], rate: float, precision: str) -> torch.optim.Muon:
    """Build Muon for matrices, with rates that match AdamW's; `precision` is "bfloat16" or "float32"."""
    kind = torch.optim.Muon if precision == "bfloat16" else SingleMuon
    return kind(weights, lr=rate, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw")
