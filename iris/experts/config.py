"""What `ctx.experts` sets aside, and how many programs its kernels have."""

from dataclasses import dataclass

from iris.arg_parser import count
from iris.errors import InvalidConfigError, short_repr

LAYOUTS = ("expanded", "compact")
LARGEST = {"num_sms": 1 << 16, "in_flight": 64, "alignment": 1 << 16}


@dataclass(frozen=True)
class ExpertsConfig:
    """Choices for one `iris.experts.ExpertParallel`. All ranks must give the same.

    Attributes
    ----------
    in_flight : int
        Results of dispatches that may be in use at once. Each has memory of its own.
    layouts : tuple of str
        Which layouts dispatch may be asked for, "expanded", "compact" or both. Each has memory of its own.
    alignment : int
        In the compact layout, the first row of each expert is a multiple of this.
    num_sms : int
        Programs of a kernel, half of which send, each of which may take an SM (NVIDIA) or CU (AMD); at least two. By
        default two for each of a power of two of these, below their number, so that kernels of another stream find room
        beside them. Of at most a quarter of them each has the warps of two.
    low_latency : bool, optional
        Whether rows travel as messages that need no flag, by which few tokens take the least time, and many take more.
        By default where ``ranks * max_tokens * top_k`` is 4096 or less, of up to 8 ranks; never on CDNA3. NaNs do not
        keep their bits then.
    statistics : bool
        Whether kernels count rows and time for `ExpertParallel.statistics`. It costs them some time.
    """

    in_flight: int = 2
    layouts: tuple[str, ...] = LAYOUTS
    alignment: int = 128
    num_sms: int | None = None
    low_latency: bool | None = None
    statistics: bool = False

    def __post_init__(self) -> None:
        for name, most in LARGEST.items():
            value = getattr(self, name)
            if value is None and name == "num_sms":
                continue
            number = count(value)
            if number is None or number > most:
                raise InvalidConfigError(
                    f"ExpertsConfig({name}={short_repr(value)}) cannot work: {name} is a whole number from 1 to {most}."
                )
            object.__setattr__(self, name, number)
        if self.low_latency is not None and not isinstance(self.low_latency, bool):
            raise InvalidConfigError(
                f"ExpertsConfig(low_latency={short_repr(self.low_latency)}) cannot work: low_latency is a bool, or "
                "None."
            )
        if not isinstance(self.statistics, bool):
            raise InvalidConfigError(
                f"ExpertsConfig(statistics={short_repr(self.statistics)}) cannot work: statistics is a bool."
            )
        layouts = self.layouts
        if (
            not isinstance(layouts, tuple | list | set | frozenset)
            or not layouts
            or not all(each in LAYOUTS for each in layouts)
        ):
            raise InvalidConfigError(
                f"ExpertsConfig(layouts={short_repr(layouts)}) cannot work: layouts is a tuple of one or both of "
                f"{', '.join(map(repr, LAYOUTS))}."
            )
        # Equal whatever the order and the kind of collection.
        object.__setattr__(self, "layouts", tuple(each for each in LAYOUTS if each in layouts))


DEFAULT = ExpertsConfig()
