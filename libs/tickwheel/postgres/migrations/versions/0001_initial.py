"""All tables of the main path."""

from importlib import resources

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# "pre": the code of the version before runs on with it. "post": it must be gone first.
phase = "pre"


def upgrade() -> None:
    text = (
        resources.files("tickwheel.postgres.migrations.versions")
        .joinpath("0001_initial.sql")
        .read_text("utf-8")
    )
    # As one string without parameters, so that it may hold several statements and percent signs.
    driver = op.get_bind().connection.driver_connection
    assert driver is not None
    driver.execute(text)


def downgrade() -> None:
    raise NotImplementedError("the first migration has nothing to go back to: drop the database instead")
