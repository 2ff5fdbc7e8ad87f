"""How the app of a test takes the place of the app under test."""

from flowfabric.registry import Registry


class Replaceable(Registry):
    """Something that another can stand in for, while that one is open."""

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace)
        self.adopted: list[Replaceable] = []
        """Those whose tasks it runs."""
        self._stand_ins: list[Replaceable] = []

    def is_open(self) -> bool:
        raise NotImplementedError

    def find_stand_in(self) -> "Replaceable | None":
        """The latest that stands in for this one; one that nobody has closed ends by itself."""
        return next((each for each in reversed(self._stand_ins) if each.is_open()), None)

    def replace_with(self, other: "Replaceable") -> None:
        """From now on `other` does what this, and whatever it has adopted, is asked to."""
        if other not in self._stand_ins:
            self._stand_ins.append(other)
            for each in self.adopted:
                each.replace_with(other)

    def restore_from(self, other: "Replaceable") -> None:
        """Undo `replace_with`."""
        if other in self._stand_ins:
            self._stand_ins.remove(other)
            for each in self.adopted:
                each.restore_from(other)
