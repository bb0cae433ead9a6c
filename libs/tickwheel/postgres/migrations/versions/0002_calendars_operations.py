"""Calendars, operations, and what backfills have claimed."""

from importlib import resources

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# New tables only: the code of the version before does not look at them.
phase = "pre"

_TABLES = (
    *("backfill_claim", "operation_move", "operation_step", "operation"),
    *("schedule_calendar", "calendar_revision", "calendar"),
)


def upgrade() -> None:
    text = (
        resources.files("tickwheel.postgres.migrations.versions")
        .joinpath("0002_calendars_operations.sql")
        .read_text("utf-8")
    )
    driver = op.get_bind().connection.driver_connection
    assert driver is not None
    driver.execute(text)


def downgrade() -> None:
    for table in _TABLES:
        op.execute(f"DROP TABLE {table}")
