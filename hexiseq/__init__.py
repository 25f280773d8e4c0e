"""HexiSeq: context and head parallelism for training long-context LLMs on mixed devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hexiseq.strategy import HexiSeqStrategy

__all__ = ["HexiSeqStrategy"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The planner must not pay for importing torch and Lightning.
    if name == "HexiSeqStrategy":
        from hexiseq.strategy import HexiSeqStrategy

        return HexiSeqStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
