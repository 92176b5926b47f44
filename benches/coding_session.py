"""A recorded session of a coding agent: 20 requests about a small project of our own, with tools, edits and test runs.

`REQUESTS` are what the agent received and sent in each turn. The history of a request is everything before it, so that
prompts grow and nearly all of each prompt was in the one before. Nothing here runs a model or a server.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

RESTART_AFTER = 10
"""Number of requests before the server restarts."""

READINGS = '''\
"""Readings of a tide gauge, and the log that keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta


@dataclass(frozen=True)
class Reading:
    """Height of the water at one time, in centimetres above chart datum."""

    time: datetime
    height: int


@dataclass
class TideLog:
    """Readings of one station in the order of their times."""

    station: str
    readings: list[Reading] = field(default_factory=list)

    def add(self, reading: Reading) -> None:
        """Add a reading. Raises ValueError if it is not later than the last one."""
        if self.readings and reading.time <= self.readings[-1].time:
            raise ValueError(f"{reading.time}: not later than the last reading")
        self.readings.append(reading)

    def between(self, start: datetime, end: datetime) -> list[Reading]:
        """Return the readings from `start` up to, but not including, `end`."""
        return [reading for reading in self.readings if start <= reading.time < end]

    def week(self, start: datetime) -> list[Reading]:
        """Return the readings of the seven days after `start`."""
        return self.between(start, start + timedelta(days=7))
'''
REPORT = '''\
"""Reports about a week of readings."""

from __future__ import annotations

from datetime import datetime

from tidelog.readings import TideLog


def mean_rate(log: TideLog, start: datetime) -> float:
    """Return how fast the water rose in a week on average, in centimetres an hour."""
    readings = log.week(start)
    hours = (readings[-1].time - readings[0].time).total_seconds() / 3600
    return (readings[-1].height - readings[0].height) / hours


def weekly_report(log: TideLog, start: datetime) -> str:
    """Return the lines of a report: extremes and the mean rate."""
    readings = log.week(start)
    heights = [reading.height for reading in readings]
    lines = [f"Station {log.station}, week of {start:%d %B %Y}"]
    lines.append(f"highest {max(heights)} cm, lowest {min(heights)} cm")
    lines.append(f"mean rate {mean_rate(log, start):.1f} cm/h")
    return "\\n".join(lines)
'''
TESTS = """\
from datetime import datetime

from tidelog.readings import Reading, TideLog
from tidelog.report import weekly_report

MONDAY = datetime(2024, 3, 4)


def test_a_week_with_one_reading_has_a_report():
    log = TideLog("Harbour")
    log.add(Reading(MONDAY, 310))
    assert "highest 310 cm" in weekly_report(log, MONDAY)
"""
OLD_RATE = """\
    readings = log.week(start)
    hours = (readings[-1].time - readings[0].time).total_seconds() / 3600
    return (readings[-1].height - readings[0].height) / hours
"""
NEW_RATE = """\
    readings = log.week(start)
    if len(readings) < 2:
        return 0.0
    hours = (readings[-1].time - readings[0].time).total_seconds() / 3600
    return (readings[-1].height - readings[0].height) / hours
"""
EXPORT = '''\
"""Export of readings as comma-separated values."""

from __future__ import annotations

import csv
import io
from datetime import datetime

from tidelog.readings import TideLog

HEADER = ("station", "time", "height")


def weekly_csv(log: TideLog, start: datetime) -> str:
    """Return the readings of a week as CSV with a header."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(HEADER)
    for reading in log.week(start):
        writer.writerow([log.station, reading.time.isoformat(), reading.height])
    return text.getvalue()
'''
EXPORT_TESTS = """\
from datetime import datetime

from tidelog.export import weekly_csv
from tidelog.readings import Reading, TideLog

MONDAY = datetime(2024, 3, 4)


def test_a_week_is_exported_with_a_header():
    log = TideLog("Harbour")
    log.add(Reading(MONDAY, 310))
    assert weekly_csv(log, MONDAY) == "station,time,height\\nHarbour,2024-03-04T00:00:00,310\\n"
"""
OLD_WRITER, NEW_WRITER = "csv.writer(text)", 'csv.writer(text, lineterminator="\\n")'
CSV_FAILURE = r"""
    def test_a_week_is_exported_with_a_header():
        log = TideLog("Harbour")
        log.add(Reading(MONDAY, 310))
>       assert weekly_csv(log, MONDAY) == "station,time,height\nHarbour,2024-03-04T00:00:00,310\n"
E       AssertionError: assert 'station,time,height\r\n...' == 'station,time,height\n...'
tests/test_export.py:12: AssertionError
1 failed, 1 passed in 0.04s
"""
DIVISION_FAILURE = """
    def mean_rate(log: TideLog, start: datetime) -> float:
        readings = log.week(start)
        hours = (readings[-1].time - readings[0].time).total_seconds() / 3600
>       return (readings[-1].height - readings[0].height) / hours
E       ZeroDivisionError: float division by zero
tidelog/report.py:14: ZeroDivisionError
1 failed in 0.05s
"""
FIXED_REPORT = REPORT.replace(OLD_RATE, NEW_RATE)
FIXED_EXPORT = EXPORT.replace(OLD_WRITER, NEW_WRITER)


def _text(description: str) -> dict[str, str]:
    return {"type": "string", "description": description}


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


PATH = _text("Path of the file, relative to the project.")
TOOLS = [
    _tool("list_files", "List all files of the project.", pattern=_text("Only paths that match this pattern.")),
    _tool("read_file", "Return the text of a file.", path=PATH),
    _tool("write_file", "Write a file. What it had is replaced.", path=PATH, content=_text("The whole text.")),
    _tool(
        "edit_file", "Replace a text that is in a file exactly once.",
        path=PATH, old_text=_text("The text to replace."), new_text=_text("What to put in its place."),
    ),
    _tool("run_tests", "Run the tests and return what they print.", path=_text("File or folder of tests.")),
]  # fmt: skip
SYSTEM = (
    "You are a programmer who works on the user's project with tools. Look before you change, change no more than "
    "was asked for, and run the tests after each change. Write no explanations between calls. When the work is done, "
    "say in a few sentences what you did.\n\nTo call a tool, write a JSON object with its name and arguments between "
    "tags:\n"
    '<tool_call>\n{"name": "read_file", "arguments": {"path": "README.md"}}\n</tool_call>\n\nThe tools are:\n'
    + "\n".join(json.dumps(tool["function"]) for tool in TOOLS)
)


@dataclass(frozen=True)
class Request:
    """One request of the session. `message`: its new message. `answer`: the recorded answer of the model."""

    message: str
    answer: str


def _call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _result(text: str) -> str:
    return f"<tool_response>\n{text.strip()}\n</tool_response>"


REQUESTS = [
    Request(
        "The report of a week that has only one reading fails. Find out why and repair it.",
        _call("list_files", pattern="*.py"),
    ),
    Request(
        _result("tests/test_report.py\ntidelog/__init__.py\ntidelog/readings.py\ntidelog/report.py"),
        _call("read_file", path="tidelog/report.py"),
    ),
    Request(_result(REPORT), _call("read_file", path="tidelog/readings.py")),
    Request(_result(READINGS), _call("read_file", path="tests/test_report.py")),
    Request(_result(TESTS), _call("run_tests", path="tests")),
    Request(
        _result(DIVISION_FAILURE),
        _call("edit_file", path="tidelog/report.py", old_text=OLD_RATE, new_text=NEW_RATE),
    ),
    Request(_result("tidelog/report.py: 1 text replaced"), _call("run_tests", path="tests")),
    Request(
        _result("1 passed in 0.03s"),
        "A week with one reading has no time between its first and its last reading, so the mean rate was divided by "
        "zero hours. mean_rate in tidelog/report.py now returns 0.0 if there are fewer than two readings. The test "
        "passes.",
    ),
    Request(
        "Good. Now add a module tidelog/export.py with a function weekly_csv that returns the readings of a week as "
        "CSV, with a header of station, time and height. It takes the same arguments as weekly_report. Add a test.",
        _call("write_file", path="tidelog/export.py", content=EXPORT),
    ),
    Request(
        _result("tidelog/export.py: written"),
        _call("write_file", path="tests/test_export.py", content=EXPORT_TESTS),
    ),
    Request(_result("tests/test_export.py: written"), _call("run_tests", path="tests")),
    Request(
        _result(CSV_FAILURE),
        _call("edit_file", path="tidelog/export.py", old_text=OLD_WRITER, new_text=NEW_WRITER),
    ),
    Request(_result("tidelog/export.py: 1 text replaced"), _call("run_tests", path="tests")),
    Request(
        _result("2 passed in 0.03s"),
        "weekly_csv in tidelog/export.py writes a header and one line for each reading of the week. Python's csv "
        "module ends lines with a carriage return by default, which the test found, so the writer now ends them with "
        "a newline. Both tests pass.",
    ),
    Request(
        "One more thing: Reading.height should be called height_cm, everywhere, and in the header of the CSV too.",
        _call(
            "edit_file", path="tidelog/readings.py", old_text="    height: int\n", new_text="    height_cm: int\n",
        ),
    ),
    Request(
        _result("tidelog/readings.py: 1 text replaced"),
        _call("write_file", path="tidelog/report.py", content=FIXED_REPORT.replace(".height", ".height_cm")),
    ),
    Request(
        _result("tidelog/report.py: written"),
        _call(
            "write_file", path="tidelog/export.py",
            content=FIXED_EXPORT.replace(".height", ".height_cm").replace('"height"', '"height_cm"'),
        ),
    ),
    Request(
        _result("tidelog/export.py: written"),
        _call(
            "edit_file", path="tests/test_export.py", old_text="station,time,height\\n",
            new_text="station,time,height_cm\\n",
        ),
    ),
    Request(_result("tests/test_export.py: 1 text replaced"), _call("run_tests", path="tests")),
    Request(
        _result("2 passed in 0.03s"),
        "Reading.height is height_cm now. I changed tidelog/readings.py, tidelog/report.py and tidelog/export.py, "
        "whose CSV has height_cm in its header, and the text that tests/test_export.py expects. Both tests pass.",
    ),
]  # fmt: skip
"""The session's requests in order."""


def messages(number: int) -> list[dict[str, str]]:
    """Return the messages of request `number`, which counts from 0: the history with its recorded answers."""
    found = [{"role": "system", "content": SYSTEM}]
    for request in REQUESTS[:number]:
        found += [{"role": "user", "content": request.message}, {"role": "assistant", "content": request.answer}]
    return [*found, {"role": "user", "content": REQUESTS[number].message}]
