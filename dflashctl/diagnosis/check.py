"""One check, and the list that a place's checks are noted in."""

from dataclasses import dataclass, field

OK, WARN, FAIL, SKIPPED = "ok", "warn", "FAIL", "skipped"


@dataclass(frozen=True)
class Check:
    """What was found, and the command to paste when it is not right.

    place: "laptop", "kpro6" or "kpro6/200". status: ok, warn, FAIL or skipped. mend: the argv, to
    run at ``place``, of those fixes that are safe to make without knowing more.
    """

    place: str
    name: str
    status: str
    found: str
    fix: str = ""
    mend: tuple[str, ...] = ()


@dataclass
class Checks:
    """Notes the checks of one place, in order."""

    place: str
    noted: list[Check] = field(default_factory=list)

    def ok(self, name: str, found: str) -> None:
        """Note what is right."""
        self.noted.append(Check(self.place, name, OK, found))

    def skip(self, name: str, why: str) -> None:
        """Note what was not looked at, and why."""
        self.noted.append(Check(self.place, name, SKIPPED, why))

    def warn(self, name: str, found: str, fix: str = "", mend: tuple[str, ...] = ()) -> None:
        """Note what works now and may not later."""
        self.noted.append(Check(self.place, name, WARN, found, fix, mend))

    def fail(self, name: str, found: str, fix: str = "", mend: tuple[str, ...] = ()) -> None:
        """Note what no run can do with."""
        self.noted.append(Check(self.place, name, FAIL, found, fix, mend))

    def judge(self, name: str, found: str, wrong: str | None, fix: str = "") -> None:
        """Note a failure when ``wrong`` says something, else what was found."""
        if wrong:
            self.fail(name, wrong, fix)
        else:
            self.ok(name, found)
