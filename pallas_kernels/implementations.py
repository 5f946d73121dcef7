"""Picks the implementation of an op."""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

Result = TypeVar("Result")


class NotForThis(NotImplementedError):
    """An implementation is for another platform, or has to be asked for by name."""


class Taken(NamedTuple):
    """The implementation that an op took when it was traced.

    Attributes:
      reasons: why each better one for this platform does not cover the case; () if none is.
    """

    op: str
    implementation: str
    reasons: tuple[str, ...] = ()


_recorded: contextvars.ContextVar[list[Taken] | None] = contextvars.ContextVar(
    "recorded", default=None
)


@contextlib.contextmanager
def recorded() -> Iterator[list[Taken]]:
    """Context that records, in the list that it yields, what ops take when they are traced.

    Each entry stands once, in the order in which it was first taken.
    """
    found: list[Taken] = []
    token = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(token)


# Part of the key of jit's caches: code traced for one platform is not run on another.
_platform = jax.make_user_context(default_value=None)


# Whether what is traced is the body of a loop that carries its pages.
_is_looped = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def in_a_loop() -> Iterator[None]:
    """Context in which ops are traced inside a loop that carries their pages.

    There kernels keep pages in HBM: otherwise XLA would copy an array that fits into VMEM there
    and back in every step (jax 0.10.2, libtpu 0.0.42). Outside of loops, where an argument of the
    program is written, libtpu refuses this constraint.
    """
    with _is_looped(True):
        yield


# Pairs of an op and an implementation; part of the key of jit's caches.
_named = jax.make_user_context(default_value=())


@contextlib.contextmanager
def by_name(named: Iterable[tuple[str, str]]) -> Iterator[None]:
    """Context that sets the implementation of ops called without `implementation`.

    Args:
      named: pairs of an op and an implementation, from `pallas_kernels.names`. Other ops pick
        the best for their case.
    """
    with _named(tuple(sorted(named))):
        yield


def named_for(op: str, name: str | None) -> str | None:
    """Returns `name`, or if it is None the implementation that `by_name` sets, if any."""
    return dict(_named.value).get(op) if name is None else name


# Pairs of an op and an implementation; part of the key of jit's caches.
_trusted = jax.make_user_context(default_value=())


@contextlib.contextmanager
def trusting(kernels: Iterable[tuple[str, str]]) -> Iterator[None]:
    """Context in which kernels that are otherwise taken only by name are tried for their ops.

    Where one does not cover a case, the next implementation is taken, as by default.

    Args:
      kernels: pairs of an op and an implementation that agreed with the reference on the device.
    """
    with _trusted(tuple(sorted(kernels))):
        yield


def trusted_for(op: str) -> str | None:
    """Returns the implementation of an op that `trusting` names, if any."""
    return dict(_trusted.value).get(op)


def is_in_a_loop() -> bool:
    """Returns whether the code is traced inside `in_a_loop`."""
    return _is_looped.value


@contextlib.contextmanager
def lowered_for(
    platform: str, device_kind: str | None = None, compiler: str | None = None
) -> Iterator[None]:
    """Context that traces ops for a platform, "cpu", "gpu" or "tpu", not for this process's own.

    It is for ahead-of-time compilation: an op picks its implementation when it is traced.

    Args:
      device_kind: jax's name of the device, by which measured block sizes are chosen.
      compiler: the platform whose compiler stands in for that of `platform`; None: none does.
    """
    with _platform((platform, device_kind, compiler or platform)):
        yield


def target_kind() -> str | None:
    """Returns the kind of device that ops are traced for, or None if unknown."""
    if _platform.value is not None:
        return _platform.value[1]
    return default_device().device_kind if target_platform() == "tpu" else None


def target_platform() -> str:
    """Returns the platform that ops are traced for: of `lowered_for`, or of jax's default."""
    if _platform.value is not None:
        return _platform.value[0]
    device = _default_device()
    return device if isinstance(device, str) else device.platform


def compiler_platform() -> str:
    """Returns the platform whose compiler ops are traced for: `target_platform`, or a stand-in."""
    return target_platform() if _platform.value is None else _platform.value[2]


def default_device() -> Any:
    """Returns the jax.Device that jax runs on where nothing else is said."""
    device = _default_device()
    return jax.devices(device)[0] if isinstance(device, str) else device


def _default_device() -> Any:
    """Returns the same, or the name of its platform where jax was given no more than that."""
    device = getattr(jax.config, "jax_default_device")  # noqa: B009 (jax adds it when it runs)
    return jax.devices()[0] if device is None else device


def by_platform(
    *operands: Any, cpu: Callable[..., Result], default: Callable[..., Result]
) -> Result:
    """Returns `cpu(*operands)` where a CPU's compiler compiles, and `default(*operands)` elsewhere.

    jax.lax.platform_dependent would trace both and lower a branch between them: a generation of the
    embedded pair then takes a third more of a core until its steps are compiled (jax 0.10.2). So
    code is for the devices that it is traced for, as kernels are; elsewhere it is right and slower.
    """
    return (cpu if compiler_platform() == "cpu" else default)(*operands)


def needs_platform(platform: str, call: Callable[[], Result]) -> Callable[[], Result]:
    """Returns `call`, which then raises NotImplementedError if traced for another platform."""

    def checked() -> Result:
        if (own := target_platform()) != platform:
            raise NotForThis(f"runs on {platform}, and this is {own}.")
        # Kernels use 32-bit types and standard promotion, whatever the program sets in jax.
        with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
            return call()

    return checked


def if_named(candidate: str, name: str | None, call: Callable[[], Result]) -> Callable[[], Result]:
    """Returns `call`, which then raises NotImplementedError unless `name` is `candidate`."""

    def checked() -> Result:
        if name != candidate:
            raise NotForThis("is taken only where it is named or trusted.")
        return call()

    return checked


def call_best(
    op: str, implementations: Mapping[str, Callable[[], Result]], name: str | None
) -> Result:
    """Calls the named implementation of an op, or the first that covers the case.

    Args:
      implementations: by name, best first; each raises NotImplementedError for a case
        it does not cover.
      name: the one to call; None tries all in order.

    Raises:
      ValueError: no implementation has this name.
      NotImplementedError: none covers the case; the message has every reason.
    """
    if name is not None:
        if name not in implementations:
            raise ValueError(
                f"{op} has no implementation={name!r}; expected one of "
                f"{', '.join(implementations)}."
            )
        try:
            result = implementations[name]()
        except NotImplementedError as error:
            raise type(error)(f"{op} by implementation={name!r}: {error}") from error
        _record(Taken(op, name))
        return result
    reasons, own = [], []
    for candidate, call in implementations.items():
        try:
            result = call()
        except NotImplementedError as error:
            reasons.append(f"{candidate}: {error}")
            if not isinstance(error, NotForThis):
                own.append(reasons[-1])
            continue
        _record(Taken(op, candidate, tuple(own)))
        return result
    raise NotImplementedError(f"No implementation of {op} covers this. " + " ".join(reasons))


def _record(taken: Taken) -> None:
    found = _recorded.get()
    if found is not None and taken not in found:
        found.append(taken)
