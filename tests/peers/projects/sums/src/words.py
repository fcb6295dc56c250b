"""A taskset of verifiers: a word that is to be said, and a tool server of each task's own that knows it."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Words"]


class WordData(vf.TaskData):
    word: str


class Dictionary(vf.Toolset[vf.ToolsetConfig]):
    async def setup_task(self, task: WordData) -> None:
        self.word = task.word

    @vf.tool
    def look_up(self) -> str:
        """The word."""
        return self.word


class Word(vf.Task[WordData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Dictionary(vf.ToolsetConfig())]

    @vf.reward
    async def is_said(self, task: WordData, trace: vf.Trace) -> float:
        return float(task.word in trace.last_reply)


class Words(vf.Taskset[Word]):
    def load(self) -> Iterator[Word]:
        yield Word(
            WordData(id="blue", prompt="You want to hear which colour the sky has.", word="blue"), self.config.task
        )


if __name__ == "__main__":
    Dictionary.run()
