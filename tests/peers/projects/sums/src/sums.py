"""A taskset of verifiers: sums, and a calculator that is to work them out."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class Used(vf.State):
    times: int = 0


class Calculator(vf.Toolset[vf.SharedToolsetConfig, Used]):
    """Adds."""

    @vf.tool
    def add(self, left: int, right: int) -> int:
        """Add two numbers."""
        self.state.times += 1
        return left + right


class SumData(vf.TaskData):
    total: int
    """What is right."""


class Sum(vf.Task[SumData, Used]):
    @vf.stop
    def is_enough(self, trace: vf.Trace) -> bool:
        """Nobody may add more than twice."""
        return trace.state.times > 2

    @vf.reward(weight=0.75)
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        if "divide by zero" in trace.last_reply:
            raise ZeroDivisionError("as was said")
        return float(str(task.total) in trace.last_reply)

    @vf.reward(weight=0.25)
    async def calculated(self, trace: vf.Trace) -> float:
        return float(trace.state.times > 0)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Sums(vf.Taskset[Sum]):
    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Calculator(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[Sum]:
        for left, right in ((2, 3), (40, 2)):
            told = {"prompt": f"What is {left} + {right}?", "system_prompt": "Use the calculator."}
            yield Sum(SumData(id=f"{left}+{right}", total=left + right, **told), self.config.task)


if __name__ == "__main__":
    Calculator.run()
