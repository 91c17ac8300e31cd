//! `ddp-train` itself, started as people start it, alone and under the real `mpirun`: what it prints, which files it leaves,
//! which code it ends with, and that one failure ends all ranks, soon and with its cause said once.
//!
//! Built without the feature `mpi`, the tests that need ranks are left out. With it, a machine without `mpirun` fails them.

mod alone;
mod audit;
mod benches;
mod command_line;
mod data;
mod disk;
mod events;
mod face;
mod inspect;
mod job;
mod made;
mod options;
mod reading;
mod record;
mod report;
mod resuming;
mod same;
mod stopping;
mod using;

#[cfg(feature = "mpi")]
mod faults;
#[cfg(feature = "mpi")]
mod handshake;

#[cfg(not(feature = "mpi"))]
#[test]
fn ranks_under_mpirun() {
    println!("skipped: built without MPI");
}
