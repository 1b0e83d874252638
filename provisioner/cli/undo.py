"""`provision undo`: what apply did, taken back."""

from __future__ import annotations

import click

from provisioner.cli.console import print_line


@click.command("undo", epilog="Example: provision undo")
@click.option("--dry-run", is_flag=True, help="Show what would go, and change nothing.")
@click.option("--force", is_flag=True, help="Go on although containers may lose their GPUs.")
@click.option("--verbose", "-v", is_flag=True, help="Say each step.")
def command(dry_run: bool, force: bool, verbose: bool) -> None:
    """Take back the plan in force: files and live cgroups as before apply.

    No worker is killed: slices that still hold processes are given all CPUs and memory nodes.
    """
    from provisioner.applied import read_applied
    from provisioner.cli.live import live_root, make_tell, open_systemd, require_root, tell_waiting
    from provisioner.errors import Problem, ProblemsError
    from provisioner.filestore import locked
    from provisioner.guard import run_guarded
    from provisioner.preflight import check_reload
    from provisioner.undo import undo

    require_root("undo")
    root = live_root()
    tell = make_tell(verbose)

    def go_on() -> tuple[Problem, ...]:
        # Half undone is no state to go back from: what is left is done here.
        again = read_applied()
        if again is not None:
            undo(again, again.layout, open_systemd(), root, tell)
        return ()

    with locked(tell_waiting):
        applied = read_applied()
        if applied is None:
            print_line("No plan is in force: nothing to take back.")
            return
        if dry_run:
            for path in applied.paths:
                print_line(f"  - {path}")
            for name in applied.slices:
                print_line(f"  {name}: is stopped, or released if it holds processes")
            for name in applied.before:
                print_line(f"  {name}: is given back its CPUs")
            print_line("Nothing was changed: this was a dry run.")
            return
        if applied.mode != "transient":
            problems = tuple(check_reload(open_systemd(), root, force=force))
            if problems:
                raise ProblemsError(problems, subject="undo")
        done = run_guarded(
            lambda: undo(applied, applied.layout, open_systemd(), root, tell), go_on, "undo"
        )
    print_line(f"{len(done.removed)} files removed, {len(done.stopped)} slices stopped.")
    for name in done.released:
        print_line(f"{name} still holds processes: they go on, and may now run anywhere.")
    for path in done.kept_files:
        print_line(f"{path} is not provision's any more: it was left.")
    for path in done.kept_folders:
        print_line(f"{path} holds something else: it was left.")
