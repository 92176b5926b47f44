"""`specrs bench`: finds the kind of measurement. Each kind has a module."""

from __future__ import annotations

import argparse

from specrs.cli.bench import acceptance, latency, plot, serve, sweep, throughput

__all__ = ["acceptance", "add_arguments", "latency", "plot", "run", "serve", "sweep", "throughput"]

DESCRIPTION = (
    "Measure a server (serve), an engine in this process (throughput, latency, acceptance), or many servers (sweep)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each kind of measurement."""
    commands = parser.add_subparsers(dest="bench", metavar="KIND", title="kinds", required=True)
    for module in (serve, throughput, latency, acceptance, sweep, plot):
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=module.SUMMARY, description=module.DESCRIPTION)
        module.add_arguments(command)
        command.set_defaults(run_kind=module.run, parser=command)


def run(arguments: argparse.Namespace) -> None:
    """Run the chosen kind of measurement."""
    arguments.run_kind(arguments)
