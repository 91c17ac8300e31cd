//! A thread of each rank. It notices that a rank, the launcher or the job has ended, also while the
//! rank computes: then it ends the process. It waits for the end of the launcher and of the other
//! ranks of its host, and looks 20 times a second at the board and for news of other hosts.
//!
//! Within a host it notices every way in which a rank or the launcher can end. From other hosts it
//! hears of failures that a rank there could still report, and over TCP of a rank whose sockets
//! close. A host that disappears as a whole is noticed by the launcher, or by the timeout of the
//! next collective.
//!
//! In an elastic job the launcher tells of lost ranks (`membership/client.rs`). There the watch
//! ends the calls of the generation only where a rank of another host closes its sockets.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::background::{Background, Cancelled};
use crate::error::{Cause, EXIT_PEER_LOST, Remedy, Result};
use crate::launch::stop::{self, Termination};
use crate::launcher;
use crate::process::{Peer, Process, wait_for_end};
use crate::transport::failure::alerts::{Alerts, WorkNews};
use crate::transport::failure::{Failure, GRACE};

/// Longer than it takes on a busy machine until one signal has reached all ranks.
const NEXT_SIGNAL: Duration = Duration::from_secs(5);
/// How often the watch looks at the board. The end of a process wakes it earlier.
const PERIOD: Duration = Duration::from_millis(50);

/// Watches the processes that `failure` knows.
pub(crate) fn start(failure: Arc<Failure>) -> Result<Background> {
    Background::start("watch", move |cancelled| watch(&failure, cancelled))
}

fn watch(failure: &Failure, cancelled: &Cancelled) {
    let mut sigterm = Termination::catch();
    // In an elastic job the launcher tells this rank of their ends.
    let own = failure.peers.iter().filter(|_| failure.client.is_none());
    let mut peers: Vec<&Peer> = own.collect();
    let mut sent = WorkNews::default();
    while !cancelled.within(Duration::ZERO) {
        let processes = peers.iter().map(|peer| &peer.process);
        let processes: Vec<&Process> = processes.chain(&failure.launcher).collect();
        let ended = wait_for_end(&processes, PERIOD);
        failure.link.iter().for_each(|link| link.tell_if_asked());
        if let Some(alerts) = &failure.alerts {
            alerts.tell_of_work(&mut sent, &failure.board);
        }
        match news(failure) {
            // The job continues in another generation, which has its own watch.
            Some(cause) if cause.ends_generation() => return,
            Some(cause) => {
                // Leaves this rank a moment to end by itself.
                if !cancelled.within(GRACE) {
                    failure.end(cause.exit_code);
                }
                return;
            }
            None => {}
        }
        let lost_here = ended.and_then(|index| lost(failure, &mut peers, index));
        let lost_elsewhere = || failure.alerts.as_ref().and_then(Alerts::lost);
        if let Some(lost) = lost_here.or_else(lost_elsewhere) {
            // A second Ctrl-C ends ranks one after the other: this one may be next.
            if stop::is_interrupted() && cancelled.within(NEXT_SIGNAL) {
                return;
            }
            if failure.client.is_some() && lost.rank != failure.identity.rank {
                failure.end_generation(lost.text);
            } else {
                // At once: mpirun sees it too, and is about to end this rank.
                failure.report(&lost);
            }
        } else if let Some(sigterm) = sigterm.take_if(|sigterm| sigterm.has_come()) {
            return asked_to_end(failure, sigterm, cancelled);
        }
    }
}

/// Why the job or this generation ends, if it does, according to this host or another.
fn news(failure: &Failure) -> Option<Cause> {
    if let Some(alerts) = &failure.alerts {
        alerts.listen(&failure.board);
    }
    failure.ended()
}

/// SIGTERM has come, and no rank of this host has died. If one of another host has, news of it is
/// on its way; otherwise all were asked to end, and ending is not a failure.
fn asked_to_end(failure: &Failure, sigterm: Termination, cancelled: &Cancelled) {
    let started = Instant::now();
    while started.elapsed() < GRACE {
        if cancelled.within(Duration::from_millis(20)) {
            return;
        }
        if let Some(cause) = news(failure).filter(|cause| !cause.ends_generation()) {
            if !cancelled.within(GRACE) {
                failure.end(cause.exit_code);
            }
            return;
        }
    }
    sigterm.obey();
}

/// Why the job fails because a process has ended: one of `peers`, or after them the launcher.
fn lost(failure: &Failure, peers: &mut Vec<&Peer>, index: usize) -> Option<Cause> {
    let (rank, text) = if index < peers.len() {
        let peer = peers.swap_remove(index);
        // It has ended: whether it left in order does not change any more.
        if failure.board.has_left(peer.local_rank) {
            return None;
        }
        // It ended while ranks met, which this rank has done: the reason is known.
        if launcher::is_reported() {
            failure.end(EXIT_PEER_LOST);
        }
        let text = format!(
            "process {} ended without reporting an error: it was killed (kill -9, out of memory), \
             crashed, or left before the others; help: the kernel's log (dmesg) shows crashes and \
             kills for lack of memory, but not a kill -9; {}",
            peer.process.pid,
            (failure.remedy_text)(Remedy::Continue)
        );
        let text = text.trim_end_matches("; ").to_string();
        (peer.rank, text)
    } else {
        let pid = failure.launcher.as_ref()?.pid;
        if failure.client.as_ref().is_some_and(|it| it.is_of_agent()) {
            let text = format!("what started the ranks of this host (process {pid}) has ended");
            failure.leave(&text, EXIT_PEER_LOST);
        }
        let remedy = (failure.remedy_text)(Remedy::Continue);
        let text = format!("the launcher of this job (process {pid}) has ended; {remedy}");
        let text = text.trim_end_matches("; ").to_string();
        (failure.identity.rank, text)
    };
    Some(Cause {
        rank,
        host: failure.identity.host.clone(),
        exit_code: EXIT_PEER_LOST,
        text,
    })
}
