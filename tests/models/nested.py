"""Training settings written flat, for short tests."""

from puna.models.training.settings import ComputeSettings, OptimizerSettings, ScheduleSettings

GROUPS = {"schedule": ScheduleSettings, "optimizer": OptimizerSettings, "compute": ComputeSettings}


def nested(**flat) -> dict:
    """Return `flat` with each field in its group; `optimizer` is the optimizer's name, `schedule` the schedule's shape."""
    renamed = {"optimizer": "name", "schedule": "shape"}
    found: dict = {}
    for name, value in flat.items():
        field = renamed.get(name, name)
        group = next((g for g, kind in GROUPS.items() if (g == name if name in renamed else field in kind.model_fields)), None)
        (found if group is None else found.setdefault(group, {}))[field] = value
    return found
