"""`python -m powerinfer_rs` is `powerinfer`."""

from .cli import main

main()
