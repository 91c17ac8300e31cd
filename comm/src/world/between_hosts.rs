//! How ranks of several hosts connect once they have met: each has a socket to every rank of
//! another host, whoever brought them together.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::meeting::{ACTION, Meeting, Network};
use crate::error::{Error, Remedy, Result};
use crate::launcher::patience;
use crate::membership::client::Client;
use crate::transport::frames::Frames;
use crate::transport::placement::Placement;
use crate::transport::tcp::{self, Acceptor, FRAME_BYTES_MAX, JobKey, Joined, Mesh};

/// Minimum extra time for ranks that cannot reach each other to report it.
const REPORT_MIN: Duration = Duration::from_secs(15);

/// Connects each rank with those of other hosts. A rank first calls those below it, in order, then
/// waits for those above. `names` has the host of each.
pub(super) fn connect_hosts(
    meeting: &mut dyn Meeting,
    placement: &Placement,
    names: &[&str],
) -> Result<Mesh> {
    let (rank, limit) = (meeting.rank(), meeting.timeout());
    let network = meeting.network(placement)?;
    let Network { job, secret, .. } = network;
    let key = JobKey::new(&format!("mesh {job}"), secret, rank, names.len());
    let (client, order) = (network.client, meeting.numbers().order.clone());
    let key = key.with(client.clone());
    let late = |missing: &[usize], error| {
        let missing = missing.iter().map(|&rank| order[rank]);
        misses(&client, missing.collect(), limit, error)
    };
    let (listener, port) = tcp::listen_for_ranks(&network.addresses)?;
    let own = network.addresses.iter();
    let own: Vec<SocketAddr> = own.map(|&it| SocketAddr::new(it, port)).collect();
    let addresses = meeting.exchange(&json!(own))?;
    let others = placement.elsewhere();
    let (below, above): (Vec<usize>, Vec<usize>) = others.iter().partition(|&&it| it < rank);
    let mut joined: Vec<Joined> = Vec::new();
    for other in below {
        let theirs: Vec<SocketAddr> =
            serde_json::from_value(addresses[other].clone()).unwrap_or_default();
        let theirs = nearest_first(theirs, &network.addresses);
        let place = format!("{} on {}", list(&theirs), names[other]);
        // The one below says first whom it misses.
        let limit = limit.saturating_add(patience(rank));
        let theirs = || theirs.clone();
        let connected = tcp::connect(other, theirs, &place, &key, FRAME_BYTES_MAX, limit);
        joined.push(connected.map_err(|error| late(&[other], error))?);
    }
    let mut listener = Acceptor::new(listener, key, FRAME_BYTES_MAX)?;
    let gathered = listener.gather(&above, limit, &format!("{} on {}", list(&own), names[rank]));
    gathered.map_err(|error| late(&listener.missing(&above), error))?;
    joined.append(&mut listener.joined);
    let mut peers: Vec<Option<(Frames, String)>> = names.iter().map(|_| None).collect();
    for it in joined {
        peers[it.rank] = Some((it.frames, names[it.rank].to_string()));
    }
    if client.is_some() {
        // No rank continues before all are connected: it would time out on two ranks that miss each
        // other, and name both. These report first.
        let limit = limit.saturating_add(limit.max(REPORT_MIN));
        meeting.exchange_within(&Value::Null, limit)?;
    }
    Ok(Mesh::new(rank, peers))
}

/// `theirs` in the order in which to try them: first those of a network that this host seems to be
/// in, and last those that this host has, too, such as that of a bridge for containers.
fn nearest_first(mut theirs: Vec<SocketAddr>, own: &[IpAddr]) -> Vec<SocketAddr> {
    // How many bits at the end differ.
    let distance = |theirs: IpAddr, own: &IpAddr| match (theirs, own) {
        (IpAddr::V4(it), IpAddr::V4(own)) => 32 - (it.to_bits() ^ own.to_bits()).leading_zeros(),
        (IpAddr::V6(it), IpAddr::V6(own)) => 128 - (it.to_bits() ^ own.to_bits()).leading_zeros(),
        _ => u32::MAX,
    };
    theirs.sort_by_key(|it| {
        let nearest = own.iter().map(|own| distance(it.ip(), own)).min();
        (nearest == Some(0), nearest)
    });
    theirs
}

/// `10.0.0.1:4000 or 10.1.0.1:4000`.
fn list(addresses: &[SocketAddr]) -> String {
    let texts: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
    texts.join(" or ")
}

/// The error of a rank to which others did not connect. In an elastic job it names those that were
/// too late, by the numbers with which they came, and the launcher leaves them out.
pub(super) fn misses(
    client: &Option<Arc<Client>>,
    missing: Vec<usize>,
    limit: Duration,
    error: Error,
) -> Error {
    let is_late = error.remedy() == Some(Remedy::LongerTimeout);
    if client.is_none() || !is_late || missing.is_empty() {
        return error;
    }
    Error::Timeout {
        call: ACTION.into(),
        missing,
        waited: limit,
        total: limit,
    }
}

#[cfg(test)]
mod tests;
