"""A configuration composed in this process: what `train.py` would get on its command line, without running a recipe."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from recipes.job import CONF, Config


def composed(overrides: Sequence[str]) -> Config:
    """The resolved configuration for these overrides (``+cluster=NAME``, ``model=M``, ``data.seq_len=N``, ...).

    Raises:
        hydra.errors.HydraException: a name or key that is not there.
    """
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", list(overrides))
    resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}
