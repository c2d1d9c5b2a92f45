"""Mutation tests of kernels: leave out one synchronisation at a time, and see that somebody notices.

    assert not survivors(attention, q, k, v, atol=1e-2)

A mutant is killed if its result differs from the whole kernel's, or if the interpreter raises: a race, a deadlock
(every thread waits; no clock is involved, and no thread is left behind), an accumulator read too early, a copy never
waited for, a barrier's phase missed. One that survives is a synchronisation that does nothing, or one that no input
given needs: a loop that is not entered, a stage that is not used twice.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from mosaic_interpreter import extended_interpreter
from mosaic_jaxpr import Site

Mutant = Callable[[bool], list[np.ndarray]]  # of whether the threads run from last to first


def mutations(fn: Callable[..., Any], *args: Any) -> tuple[list[np.ndarray], list[tuple[str, Mutant]]]:
    """The arrays that `fn(*args)` returns, and what it is called without each synchronisation equation of its kernels.

    `fn` runs interpreted kernels (`interpret=interpret_params()`) and can be jitted: it is traced once for all mutants.
    Equations in loops, branches and nested functions count once, those that Python unrolled once each.
    """
    compiled = jax.jit(fn)

    def run(deleted: Site | None, reverse: bool) -> list[np.ndarray]:
        with extended_interpreter(deleted, reverse) as session:
            arrays = [np.asarray(x) for x in jax.tree.leaves(compiled(*args))]
        sites.extend(session.sites if deleted is None else ())
        return arrays

    sites: list[Site] = []
    reference = run(None, False)
    return reference, [(str(site), functools.partial(run, site)) for site in sites]


def verdict(
    mutant: Mutant, reference: list[np.ndarray], atol: float, orders: Sequence[bool] = (False, True)
) -> str | None:
    """How the mutant was found out, None if it was not, with the threads in neither of the orders."""
    for reverse in orders:
        try:
            got = mutant(reverse)
        except Exception as error:
            message = str(error)  # ends with the traceback of the interpreter
            return "a race" if "RACE DETECTED" in message else message.strip().splitlines()[-1]
        for x, y in zip(got, reference, strict=True):
            if not np.allclose(x.astype(np.float64), y.astype(np.float64), rtol=0, atol=atol, equal_nan=True):
                return "another result"
    return None


def survivors(fn: Callable[..., Any], *args: Any, atol: float = 1e-3) -> list[str]:
    """The mutants of `fn(*args)` that nothing tells from it. An error if there are no mutants at all."""
    reference, mutants = mutations(fn, *args)
    if not mutants:
        raise ValueError("the kernels have no synchronisation to leave out")
    return [name for name, mutant in mutants if verdict(mutant, reference, atol) is None]
