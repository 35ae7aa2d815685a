# Both commands need python3 (3.10 or newer), make and pip only. A second run installs nothing.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: perf test venv lint types unit correctness recorded clean

perf: venv
	$(VENV)/bin/python -m pytest tests/perf -m fsdp8

test: lint types
	$(VENV)/bin/python -m pytest

venv: $(STAMP)

$(STAMP): pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints-cpu.txt --editable '.[cpu,report,dev]'
	touch $@

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: venv
	$(VENV)/bin/mypy

unit: venv
	$(VENV)/bin/python -m pytest tests/unit

correctness: venv
	$(VENV)/bin/python -m pytest -m correctness

recorded: venv
	$(VENV)/bin/python -m pytest tests/perf -m recorded

clean:
	rm -rf $(VENV) .gauge build *.egg-info src/*.egg-info
