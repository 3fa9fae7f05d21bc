"""The options of the Checkpointer behind a Trainer: the user's, and what its arguments say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.trainer_utils import HubStrategy

from ckptkit.core.errors import UsageError
from ckptkit.integrations.seams import saves_whole_models
from ckptkit.training.settings import Options, check_options

_TOLD_BY_ARGUMENTS = {
    "layout": "it is the Trainer's own",
    "prefix": "it is the Trainer's own",
    "keep_last": "set save_total_limit in the arguments of the Trainer",
    "keep_every": "set save_total_limit in the arguments of the Trainer",
    "keep_best": "set metric_for_best_model in the arguments of the Trainer",
    "best_mode": "set greater_is_better in the arguments of the Trainer",
}


def hub_options(trainer: Any) -> Options:
    """Returns the options that have each sharded step pushed; none where the Trainer pushes.

    The Trainer itself pushes what it has gathered (`FULL_STATE_DICT`), and what somebody calls
    `push_to_hub` for, as with the strategy `end`.

    Source: transformers 5.23, `Trainer.init_hf_repo` and `Trainer._push_from_checkpoint`.
    """
    args = trainer.args
    if not args.push_to_hub or args.hub_strategy == HubStrategy.END or saves_whole_models(trainer):
        return {}
    return {
        "push_to_hub": args.hub_model_id or Path(args.output_dir).absolute().name,
        "hub_strategy": HubStrategy(args.hub_strategy).value,
        "hub_private_repo": args.hub_private_repo,
        "hub_revision": getattr(args, "hub_revision", None),
        "hub_token": args.hub_token,
    }


def checked_options(options: Options) -> Options:
    """Returns the user's options, if they are for the user to choose.

    Raises:
        UsageError: If one is not, or has not the form that it needs.
    """
    taken = sorted(_TOLD_BY_ARGUMENTS.keys() & options.keys())
    if taken:
        raise UsageError(
            f"{taken[0]!r} is no option here", where="install", hint=_TOLD_BY_ARGUMENTS[taken[0]]
        )
    check_options(options)
    return options
