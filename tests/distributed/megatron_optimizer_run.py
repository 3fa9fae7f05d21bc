"""Goes on with Megatron-Core from checkpoints with the states of an optimizer.

The first argument is a list of runs as JSON: `source` with a step of Megatron-Core, `out` for the
next ten losses, `tp`, and `dtype` of the parameters. Needs megatron-core.

Its distributed optimizer stores with torch's AdamW and loads with Transformer Engine's alone, which
counts steps by group and needs a GPU: a stand-in takes its place.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[2] / "fixtures" / "generators"))
import megatron_models as models
import megatron_optimizer as optimizers
from megatron.core import dist_checkpointing, parallel_state


class FusedAdam(torch.optim.Optimizer):
    """Computes what Transformer Engine's AdamW does."""

    def __init__(self, params: Any, *, adam_w_mode: bool, **settings: Any) -> None:
        assert adam_w_mode
        super().__init__(params, {"bias_correction": True, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            assert isinstance(step, int)
            (one, two), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for kind in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(kind, torch.zeros_like(parameter))
                state["exp_avg"].lerp_(parameter.grad, 1 - one)
                state["exp_avg_sq"].lerp_(parameter.grad**2, 1 - two)
                root = (state["exp_avg_sq"] / (1 - two**step)).sqrt() + group["eps"]
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.sub_(lr / (1 - one**step) * state["exp_avg"] / root)


def stand_in_for_fused_adam() -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


def load(model: Any, optimizer: Any, source: str) -> None:
    """Loads as Megatron-LM does: the checkpoint says in which form the optimizer is asked for."""
    common = dist_checkpointing.load_common_state_dict(source)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    wanted: dict[str, Any] = {"model": model.sharded_state_dict(prefix="", metadata=metadata)}
    wanted["optimizer"] = optimizer.sharded_state_dict(
        dict(wanted), is_loading=True, metadata=metadata
    )
    loaded = dist_checkpointing.load(wanted, source)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    optimizers.schedule(optimizer, loaded["opt_param_scheduler"])


def go_on(source: str, out: str, tp: int, dtype: str) -> None:
    models.initialize_parallel(setup := replace(optimizers.OF_LOSSES, tp=tp, dtype=dtype))
    (model,) = models.build(setup)
    wrong = {"adam_beta1": 0.5, "adam_eps": 0.1, "weight_decay": 0.7, "min_lr": 0.0}
    wrapped, optimizer = optimizers.wrap(model, is_distributed=True, **wrong)
    load(model, optimizer, source)
    losses = optimizers.train(wrapped, optimizer, optimizers.STEPS, optimizers.NEXT)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(losses))
    parallel_state.destroy_model_parallel()


def main() -> None:
    optimizers.prepare_optimizers()
    stand_in_for_fused_adam()
    dist.init_process_group("gloo")
    for one in json.loads(sys.argv[1]):
        go_on(**one)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
