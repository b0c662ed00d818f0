"""TensorBoard's event files: one for each run, in <system>/<benchmark>/<number>@<start>/.

The bytes are a function of the log: an export leaves the bytes in the file and appends the rest, so that a
TensorBoard with the file open goes on reading. TensorBoard's own writer would put the name of the
exporting machine into the name of the file.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from common.evidence.trackers.store import Store, import_library
from common.evidence.trackers.tracked_run import TrackedRun
from common.files import make_folder, write_whole

MODULES = {  # of tensorboard: none of them imports TensorFlow or torch
    "event": "compat.proto.event_pb2",
    "hparams": "plugins.hparams.plugin_data_pb2",
    "names": "plugins.hparams.metadata",
    "records": "summary.writer.record_writer",
}
Value = dict[str, Any]  # the fields of a Summary.Value


class TensorBoardFiles(Store):
    """Scalars over samples and time; the configuration as hyperparameters and text; provenance as text."""

    view: ClassVar[str] = "tensorboard --logdir {out}"

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        self.board = SimpleNamespace(
            **{
                name: import_library(f"tensorboard.{module}", title="TensorBoard")
                for name, module in MODULES.items()
            }
        )

    def update(self, run: TrackedRun) -> None:
        content = io.BytesIO()
        writer = self.board.records.RecordWriter(content)
        for event in self.events(run):
            writer.write(event.SerializeToString(deterministic=True))
        folder = self.out / run.set_name / f"{run.number}@{run.start}"
        append_rest(folder / f"events.out.tfevents.{run.start_ms // 1000}.ttt", content.getvalue())

    def events(self, run: TrackedRun) -> Iterator[Any]:
        """Yield the records of a run, those of its end last."""
        start_s = run.start_ms / 1000
        event = self.board.event.Event
        yield event(wall_time=start_s, file_version="brain.Event:2")
        settings = "\n".join(f"    {line}" for line in run.settings)
        table = "\n".join(f"| {name} | {escape(text)} |" for name, text in run.tags.items())
        begin = [
            self.hyperparameters(run),
            pack_text("configuration", settings or "The log states none."),
            pack_text("provenance", f"| | |\n|---|---|\n{table}"),
        ]
        yield event(wall_time=start_s, summary={"value": begin})
        for one in run.measurements:
            yield self.scalar(one.metric, one.value, one.samples, one.time_ms)
        if run.stop_ms is None:
            return
        for name, value in run.outcome.items():
            yield self.scalar(name, value, run.num_samples, run.stop_ms)
        status = "STATUS_SUCCESS" if run.came_to_its_end else "STATUS_FAILURE"
        session_end = {"status": status, "end_time_secs": run.stop_ms / 1000}
        end = [
            pack_text("status", run.status),
            self.session(self.board.names.SESSION_END_INFO_TAG, session_end_info=session_end),
        ]
        yield event(wall_time=run.stop_ms / 1000, step=run.num_samples, summary={"value": end})

    def scalar(self, name: str, value: float, samples: int, time_ms: int) -> Any:
        summary = {"value": [{"tag": name, "simple_value": value}]}
        return self.board.event.Event(wall_time=time_ms / 1000, step=samples, summary=summary)

    def hyperparameters(self, run: TrackedRun) -> Value:
        """Pack the parameters for the tab HPARAMS."""
        start = self.board.hparams.SessionStartInfo(group_name=run.key, start_time_secs=run.start_ms / 1000)
        for name, value in run.parameters.items():
            kind = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
            setattr(start.hparams[name], kind, value)
        return self.session(self.board.names.SESSION_START_INFO_TAG, session_start_info=start)

    def session(self, tag: str, **content: Any) -> Value:
        data = self.board.hparams.HParamsPluginData(version=self.board.names.PLUGIN_DATA_VERSION, **content)
        plugin = {
            "plugin_name": self.board.names.PLUGIN_NAME,
            "content": data.SerializeToString(deterministic=True),
        }
        return {"tag": tag, "metadata": {"plugin_data": plugin}}


def pack_text(name: str, text: str) -> Value:
    tensor = {"dtype": "DT_STRING", "string_val": [text.encode()], "tensor_shape": {"dim": [{"size": 1}]}}
    return {"tag": name, "tensor": tensor, "metadata": {"plugin_data": {"plugin_name": "text"}}}


def escape(text: str) -> str:
    """Keep text from ending a cell of a Markdown table, and from being markup."""
    return "".join(f"&#{ord(c)};" if c in "|<>&`*_[]\\" else c for c in text)


def append_rest(path: Path, content: bytes) -> None:
    """Append the rest of `content` to a file; write it whole if the file holds anything else."""
    make_folder(path.parent)
    before = path.read_bytes() if path.exists() else b""
    if before and content.startswith(before):
        if len(content) > len(before):
            with path.open("ab") as file:
                file.write(content[len(before) :])
        return
    with write_whole(path) as draft:
        draft.write_bytes(content)
