"""To the Hub and back: pushing folders, pulling repositories, watching runs."""

from __future__ import annotations

from ckptkit.hub.download import Pulled, pull
from ckptkit.hub.publish import Pushed, push

__all__ = ["Pulled", "Pushed", "pull", "push"]
