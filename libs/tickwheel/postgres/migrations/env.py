"""Alembic's entry: it works on the connection that `tickwheel.postgres.migrate` hands over."""

from alembic import context

from tickwheel.postgres.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, transaction_per_migration=True)
with context.begin_transaction():
    context.run_migrations()
