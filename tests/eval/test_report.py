"""`cramming report` over folders of runs: whole, broken, interrupted, foreign ones; and what may be ranked."""

import csv
import io
import json
import shutil
import statistics
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from cramming.config import UserError
from cramming.journal import Journal
from cramming.record import Status
from eval.finetune.history import history_file, stamp
from eval.report import leaderboard, plots, submission
from eval.report.main import main
from eval.report.ranking import Row, gain_over, rows_of
from eval.report.wording import DASH
from eval.rules.load import load_runs
from eval.tasks.suites import AVERAGES

pytestmark = pytest.mark.usefixtures("records_only")

REPORT = {"out": None, "each_run": True, "ledger": "no duels", "repository": None}
