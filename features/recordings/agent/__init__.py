"""Recordings in an agent's process. The rest is imported when an agent is recorded or repeats a run, which few do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.parts import AgentFeature, TurnCore, TurnPart
from goondan.features.recordings import NAME, PROVIDER
from goondan.schemas.bundle.launch import AgentSpec
from goondan.schemas.wire import codec, frames

if TYPE_CHECKING:
    from goondan.features.recordings.agent.tape import Tape


class Recordings(AgentFeature):
    """What an agent instance records, or repeats."""

    name = NAME

    def __init__(self, instance: Instance) -> None:
        super().__init__(instance)
        self._tape: Tape | None = None
        if self.name in instance.spec.parts:
            self._begin_tape(instance.spec)

    def _begin_tape(self, spec: AgentSpec) -> Tape:
        from goondan.features.recordings.agent.tape import Tape
        from goondan.features.recordings.wire import RecordingsPart

        instance = self.instance
        tape = self._tape = Tape(codec.from_raw(spec.parts[self.name], RecordingsPart), instance)
        instance.servers.around = tape
        instance.providers[PROVIDER] = tape.provider
        return tape

    def applies(self, spec: AgentSpec, event: frames.Frame) -> bool:
        """Whether the instance records or repeats a run."""
        return self.name in spec.parts

    def begin(self, turn: TurnCore) -> TurnPart:
        """The recording of a turn. Raises GoondanError E_REPLAY_DIFFERS, E_CONFIG_INVALID_VALUE."""
        from goondan.features.recordings.agent.tape import TapedTurn

        return TapedTurn(self._tape or self._begin_tape(turn.spec), turn)

    def close(self) -> None:
        """Close the file that is written."""
        if self._tape is not None:
            self._tape.close()


FEATURE: Final = Recordings
