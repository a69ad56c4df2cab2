"""Options as attributes of an optimizer: what may be assigned when, and what an assignment does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from ..checks import shown
from .step import Parts


class _Owner(Protocol):
    """What an option is an attribute of."""

    @property
    def parts(self) -> Parts: ...
    @property
    def is_between_steps(self) -> bool: ...


class Option:
    """An option as an attribute of the optimizer. A new value is checked."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, opt: _Owner | None, owner: type | None = None) -> Any:
        return self if opt is None else getattr(opt.parts.options, self.name)

    def __set__(self, opt: _Owner, value: Any) -> None:
        parts = opt.parts
        parts.options = replace(parts.options, **{self.name: value})


class OfProducts(Option):
    """An option that the products of a step belong to: half a step with each value would be neither."""

    def __set__(self, opt: _Owner, value: Any) -> None:
        if not opt.is_between_steps:
            raise RuntimeError(
                f"{opt.parts.options.caller}: {self.name} can't become {shown(value)} within a step, whose passes were "
                f"made for {self.name}={getattr(opt.parts.options, self.name)!r}; assign it after step()"
            )
        super().__set__(opt, value)


class Fixed(Option):
    """An option that the memory of the state follows from."""

    def __set__(self, opt: _Owner, value: Any) -> None:
        raise AttributeError(
            f"{opt.parts.options.caller}: {self.name} is {getattr(opt.parts.options, self.name)} from construction on; "
            f"construct an optimizer with {self.name}={value!r} and load opt.state_dict() into it, which converts it"
        )


class Method(Option):
    """The variant, which follows from the class and the arguments that choose it."""

    def __set__(self, opt: _Owner, value: Any) -> None:
        name = opt.parts.options.caller
        raise AttributeError(
            f"{name}: {self.name} is what {name} and its arguments have chosen, and parts and state are made for it; "
            f"construct the optimizer of the method that you want, instead of assigning {shown(value)}"
        )


class Capturable(Option):
    """Where step counts are kept: on the device or on the host."""

    def __set__(self, opt: _Owner, value: Any) -> None:
        parts = opt.parts
        before, name = parts.options.capturable, parts.options.caller
        options = replace(parts.options, capturable=value)
        if options.capturable != before and not parts.descent.has_curvature:
            raise AttributeError(
                f"{name}: capturable is {before}, as {name} counts its steps on the host; leave it, or give the base "
                "optimizer its own capturable=True at construction"
            )
        if options.capturable != before and any(parts.params.state.values()):
            raise AttributeError(
                f"{name}: capturable is {before}, and the state is made for it; construct an optimizer with "
                f"capturable={options.capturable}, whose load_state_dict(opt.state_dict()) converts the state"
            )
        parts.options = options
