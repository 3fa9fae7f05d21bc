"""What a Checkpointer is told of the Hub, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ckptkit.core.errors import UsageError
from ckptkit.core.texts import a_kind

HubStrategy = Literal["every_save", "checkpoint", "all_checkpoints", "end"]
HUB_OPTIONS = (
    "push_to_hub",
    "hub_strategy",
    "hub_private_repo",
    "hub_revision",
    "hub_include",
    "hub_token",
    "hub_timeout_seconds",
)
_WHOLE_STEPS: dict[HubStrategy, str] = {
    "checkpoint": "last-checkpoint",
    "all_checkpoints": "checkpoint-{step}",
}


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Where steps are pushed, and which.

    Attributes:
        repo_id: The repository.
        strategy: As the Trainer's `hub_strategy`.
        private: Whether a repository that is made is private; None for the usual, private.
        revision: The branch; None for `main`.
        token: Of the Hub; None for that of the environment, or of the last login.
        include: Patterns of files that go with the step itself.
        timeout_seconds: How long `close` waits for pushes.
    """

    repo_id: str
    strategy: HubStrategy = "every_save"
    private: bool | None = None
    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    include: tuple[str, ...] = ()
    timeout_seconds: float = 3600.0

    @property
    def at_end(self) -> bool:
        """Whether only the last step is pushed, once training is over."""
        return self.strategy == "end"

    @property
    def arguments(self) -> list[str]:
        """What of it `ckptkit watch` is told; not the token."""
        told = ["--push", self.repo_id]
        visibility = {True: ["--private"], False: ["--public"], None: []}
        told += visibility[self.private]
        told += ["--revision", self.revision] if self.revision else []
        told += ["--at-end", "--last-only"] if self.at_end else []
        folder = _WHOLE_STEPS.get(self.strategy)
        told += [f"--include={pattern}" for pattern in self.include]
        return [*told, "--whole-step", folder] if folder else told

    def shared(self) -> dict[str, Any]:
        """Returns what has to be equal on all ranks."""
        return {
            "push_to_hub": self.repo_id,
            "hub_strategy": self.strategy,
            "hub_private_repo": self.private,
            "hub_revision": self.revision,
            "hub_include": list(self.include),
        }


def check_hub(given: dict[str, Any]) -> HubSettings | None:
    """Takes the options of the Hub out of those of a Checkpointer.

    Returns:
        The settings, None where nothing is to be pushed.

    Raises:
        UsageError: If one does not have the form that it needs.
    """
    found = {name: given.pop(name) for name in HUB_OPTIONS if given.get(name) is not None}
    for name in HUB_OPTIONS:
        given.pop(name, None)
    repo_id = found.pop("push_to_hub", None)
    if repo_id is None:
        if found:
            raise UsageError(
                "is given, and push_to_hub is not",
                where=next(iter(found)),
                hint='pass push_to_hub="org/name" as well',
            )
        return None
    _check_texts(repo_id, found)
    strategy = found.get("hub_strategy", "every_save")
    if strategy not in get_args(HubStrategy):
        choices = ", ".join(get_args(HubStrategy))
        raise UsageError(f"{strategy!r} is not among {choices}", where="hub_strategy")
    return HubSettings(
        repo_id=repo_id,
        strategy=strategy,
        private=found.get("hub_private_repo"),
        revision=found.get("hub_revision"),
        include=_include(found.get("hub_include", ()), strategy),
        token=found.get("hub_token"),
        timeout_seconds=_seconds(found.get("hub_timeout_seconds", HubSettings("").timeout_seconds)),
    )


def _check_texts(repo_id: object, found: Mapping[str, Any]) -> None:
    if not isinstance(repo_id, str) or not repo_id or repo_id.startswith("-"):
        raise UsageError(
            f"is {repo_id!r:.100}, where the id of a repository was expected",
            where="push_to_hub",
            hint='pass push_to_hub="org/name"',
        )
    texts = ("hub_strategy", "hub_revision", "hub_token")
    for name, kind in (("hub_private_repo", bool), *((name, str) for name in texts)):
        if name in found and not isinstance(found[name], kind):
            raise UsageError(
                f"{a_kind(found[name])} was found where a {kind.__name__} was expected", where=name
            )


def _include(value: object, strategy: HubStrategy) -> tuple[str, ...]:
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, (list, tuple)) or not all(
        isinstance(pattern, str) and pattern for pattern in patterns
    ):
        raise UsageError(
            f"is {value!r:.100}, where patterns of file names were expected", where="hub_include"
        )
    if patterns and strategy not in _WHOLE_STEPS:
        raise UsageError(
            f"adds files to the step itself, which hub_strategy={strategy!r} does not push",
            where="hub_include",
            hint=f"pass hub_strategy as one of {', '.join(_WHOLE_STEPS)}",
        )
    return tuple(patterns)


def _seconds(value: object) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and 0 < value < float("inf"):  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise UsageError(
        f"is {value!r}, where a number of seconds above 0 was expected", where="hub_timeout_seconds"
    )
