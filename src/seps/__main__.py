"""`python -m seps` is `seps`: what torchrun needs, as in `torchrun --nproc-per-node 2 -m seps train …`."""

from seps.cli import main

if __name__ == "__main__":
    main()
