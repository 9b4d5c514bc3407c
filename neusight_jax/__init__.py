"""neusight_jax: forecast how long a deep-learning model takes on a GPU, as one differentiable JAX function."""

from pathlib import Path as _Path

_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").exists() and (_root / "training").is_dir():
    # A source checkout: `training/`, `datasets/` and `checkpoints/` lie beside this folder and install below it.
    __path__.append(str(_root))
