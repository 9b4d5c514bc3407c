"""`python -m neusight_jax`: the command line."""

from neusight_jax.cli import main

if __name__ == "__main__":
    main()
