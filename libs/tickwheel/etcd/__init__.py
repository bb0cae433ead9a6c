"""The etcd adapter: who is alive, who leads, who should own which shard.

etcd is authoritative for three things, and for nothing else:

- **who is alive**: a node holds *one* lease (`lease`), and its registration `timers/<id>` and, if it leads,
  the leader key hang on that lease; when the lease lapses, they vanish together;
- **who leads**: whoever made the leader key. A term is named by that key's *create revision*, which no
  other term ever shares; names are never compared, for two processes may have been given the same one;
- **who should own a shard**: `assignments/<shard>`, written by the leader only, in transactions that
  compare the leader key's create revision and the revision of the very value that is replaced.

It does not decide whether a timer may *write*: that is the epoch in Postgres, which only grows. So a timer
that is cut off from etcd goes on dispatching; nothing it does takes effect once its shard has a newer
epoch. The one exception is `prove`: while Postgres is out of reach, a linearizable read that the
assignments still stand is the proof of ownership on which leases may be renewed. A takeover changes both,
so either is enough.

Local time only ends trust early. A renewal that was *sent* at `s` keeps the lease alive on the server until
`s + TTL` or later, so the node trusts it until `s + TTL - margin` on its own monotonic clock, and not a
moment longer, whatever else seems to work:

    node's lease                                     leadership

    NONE ---- granted ----------> HELD               FOLLOWER ---- made the key ----> LEADER
     ^                           |    ^                  ^                               |
     |               trust ended |    | renewed          |  trust ended, key gone or     |
     |                           v    |                  |  another's, resigned          |
     +-- TTL 0 or -1, not -- DOUBTFUL-+                  +-------------------------------+
         found, key gone      (act as if lost, keep asking)

- *HELD -> DOUBTFUL*: no renewal was answered in time. Leadership stops; the keepalive loop goes on, on new
  streams.
- *DOUBTFUL -> HELD*: etcd answers that the lease still lives: nothing was given away meanwhile.
- *-> NONE*: etcd says that it is gone, or a key that hangs on it vanished although keepalives are answered
  (a stale member can do that). A new lease is granted and the registration written again under it. The old
  lease is left to lapse; revoking it early would delete a registration that has not been written again yet.

A watch never ends. Whatever breaks it (a dead member, compaction, a cancel), the reader hears BROKEN, then
gets a full snapshot and the events from its revision + 1. Since a watch that went quiet says nothing about
itself, readers list everything again every few seconds.

An exception is never success: after `RegistryUnavailable` nothing is known, and what is true is read again.

Keys, all below one prefix (`/tickwheel/` by default):

    leader                 id of the leader; under its node's lease
    timers/<id>            addresses, version, capacity, load; under the timer's lease
    assignments/<shard>    timer, generation, when it was written
    drains/<id>            this timer is to be emptied
    epochs/<shard>         the highest epoch seen
    cluster/incarnation    the number of the cluster's history
    cluster/facts          system identifier, timeline and WAL position of Postgres
    cluster/doubt          what a timer found that is another history
    cluster/resumption     the last time that somebody went on although commits may be gone
    cluster/lease_ms_max   the longest lease that was ever granted

`aetcd.rpc` gives the generated stubs; channel, deadlines, keepalive, watch and failover are ours.
"""
