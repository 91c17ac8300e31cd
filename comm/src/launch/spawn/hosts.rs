//! Hosts to start ranks on, as users write them: `a:4,b:4`, or a file with a host in each line.

use std::net::{ToSocketAddrs, UdpSocket};
use std::str::FromStr;

use crate::identity::{RANKS_MAX, host_name};

/// A host and how many ranks it gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedHost {
    /// What ssh calls it: a name or an address, perhaps with a user (`ann@node1`).
    pub name: String,
    /// How many ranks it gets.
    pub ranks: usize,
    /// Whether it gets them only once another host is lost.
    pub is_spare: bool,
}

/// Distinct hosts, at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostList(pub Vec<ListedHost>);

impl FromStr for HostList {
    type Err = String;

    /// Reads `a:4,b,[fe80::1]:2`. A host without a number gets one rank.
    fn from_str(text: &str) -> Result<HostList, String> {
        let hosts = text.split(',').map(|entry| host(entry.trim(), None));
        HostList::new(hosts.collect::<Result<_, _>>()?)
    }
}

impl HostList {
    /// Reads a host file: `node1 slots=4` or `node1:4` in each line, with `#` before comments.
    pub fn of_file(text: &str) -> Result<HostList, String> {
        let mut hosts = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let mut words = line.split('#').next().unwrap_or("").split_whitespace();
            let Some(name) = words.next() else { continue };
            let mut slots = None;
            let in_line = |why: String| format!("line {}: {why}", index + 1);
            for word in words {
                match word.split_once('=') {
                    Some(("slots", number)) => slots = Some(number),
                    Some(("max_slots" | "max-slots", _)) => {}
                    _ => return Err(in_line(format!("expected HOST slots=N, got {word:?}"))),
                }
            }
            hosts.push(host(name, slots).map_err(in_line)?);
        }
        HostList::new(hosts)
    }

    fn new(hosts: Vec<ListedHost>) -> Result<HostList, String> {
        let total: usize = hosts.iter().map(|host| host.ranks).sum();
        if !(1..=RANKS_MAX).contains(&total) {
            return Err(format!("expected 1 to {RANKS_MAX} ranks, got {total}"));
        }
        for (index, host) in hosts.iter().enumerate() {
            if hosts[..index].iter().any(|other| other.name == host.name) {
                let name = &host.name;
                return Err(format!(
                    "{name} is there twice; help: give it all its ranks at once, as in {name}:4"
                ));
            }
        }
        Ok(HostList(hosts))
    }

    /// The first `count` ranks.
    pub fn first(self, count: usize) -> Result<Vec<ListedHost>, String> {
        let total: usize = self.0.iter().map(|host| host.ranks).sum();
        if count > total {
            return Err(format!("expected at most their {total} ranks, got {count}"));
        }
        let mut left = count;
        let take = |mut host: ListedHost| {
            host.ranks = host.ranks.min(left);
            left -= host.ranks;
            (host.ranks > 0).then_some(host)
        };
        Ok(self.0.into_iter().filter_map(take).collect())
    }
}

/// Reads `node1`, `node1:4`, `ann@node1:4`, `::1` or `[::1]:4`.
fn host(entry: &str, slots: Option<&str>) -> Result<ListedHost, String> {
    let bare = entry
        .strip_prefix('[')
        .and_then(|rest| rest.split_once(']'));
    let (name, count) = match bare {
        Some((address, rest)) => (address, rest.strip_prefix(':')),
        None if entry.matches(':').count() > 1 => (entry, None),
        None => entry
            .split_once(':')
            .map_or((entry, None), |(name, count)| (name, Some(count))),
    };
    // Shells and ssh must read it as nothing but a name.
    let is_known = |letter: char| letter.is_ascii_alphanumeric() || "._-:@%".contains(letter);
    if name.is_empty() || name.starts_with('-') || !name.chars().all(is_known) {
        return Err(format!("expected a host such as node1:4, got {entry:?}"));
    }
    let count = slots.or(count).unwrap_or("1");
    let ranks = count
        .parse()
        .ok()
        .filter(|ranks| (1..=RANKS_MAX).contains(ranks));
    Ok(ListedHost {
        name: name.to_string(),
        is_spare: false,
        ranks: ranks.ok_or_else(|| {
            format!("{name}: expected a number of ranks from 1 to {RANKS_MAX}, got {count:?}")
        })?,
    })
}

impl ListedHost {
    /// Whether it is this machine.
    pub fn is_here(&self) -> bool {
        let own = host_name();
        let short = own.split('.').next().unwrap_or_default();
        if [&own, short, "localhost"].contains(&self.name.as_str()) {
            return true;
        }
        let addresses = (self.name.as_str(), 0).to_socket_addrs().ok();
        // Only an own address can be bound.
        addresses.is_some_and(|mut all| all.any(|address| UdpSocket::bind(address).is_ok()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(list: Result<HostList, String>) -> Vec<(String, usize)> {
        let hosts = list.unwrap().0.into_iter();
        hosts.map(|host| (host.name, host.ranks)).collect()
    }

    fn expected<const N: usize>(hosts: [(&str, usize); N]) -> Vec<(String, usize)> {
        hosts.map(|(name, ranks)| (name.to_string(), ranks)).into()
    }

    #[test]
    fn hosts_are_read_from_a_list_and_from_a_file() {
        let list = "node1:4, ann@node2:08,10.0.0.3,[fe80::1]:2,::1".parse();
        let five = [
            ("node1", 4),
            ("ann@node2", 8),
            ("10.0.0.3", 1),
            ("fe80::1", 2),
            ("::1", 1),
        ];
        assert_eq!(listed(list), expected(five));
        let file = "# ours\nnode1 slots=4 max_slots=8\n\nnode2:2  # small\nnode3\n::1 slots=2";
        let four = [("node1", 4), ("node2", 2), ("node3", 1), ("::1", 2)];
        assert_eq!(listed(HostList::of_file(file)), expected(four));
        let first = |count| HostList::of_file(file).unwrap().first(count);
        assert_eq!(first(5).unwrap().len(), 2);
        assert_eq!(first(5).unwrap()[1].ranks, 1);
        let error = first(10).unwrap_err();
        assert_eq!(error, "expected at most their 9 ranks, got 10");
    }

    #[test]
    fn what_is_no_host_is_refused_by_name() {
        for (wrong, expected) in [
            (
                "a:,b",
                "a: expected a number of ranks from 1 to 512, got \"\"",
            ),
            ("a:0", "got \"0\""),
            ("a:513", "got \"513\""),
            (
                "a:2,b,a",
                "a is there twice; help: give it all its ranks at once",
            ),
            ("-oProxyCommand=x", "expected a host such as node1:4"),
            ("a;reboot", "got \"a;reboot\""),
            ("node[1-4]:2", "got \"node[1-4]:2\""),
            ("", "got \"\""),
            ("a:300,b:300", "expected 1 to 512 ranks, got 600"),
        ] {
            let error = wrong.parse::<HostList>().unwrap_err();
            assert!(error.contains(expected), "{wrong}: {error}");
        }
        let error = HostList::of_file("a slots=4\nb cores=2").unwrap_err();
        assert_eq!(error, "line 2: expected HOST slots=N, got \"cores=2\"");
        let error = HostList::of_file("# none\n").unwrap_err();
        assert_eq!(error, "expected 1 to 512 ranks, got 0");
    }

    #[test]
    fn this_machine_is_known_by_name_and_address() {
        let host = |name: &str| ListedHost {
            name: name.into(),
            ranks: 1,
            is_spare: false,
        };
        for own in ["localhost", &host_name(), "127.0.0.1"] {
            assert!(host(own).is_here(), "{own}");
        }
        for other in ["no-such-host.invalid", "192.0.2.1"] {
            assert!(!host(other).is_here(), "{other}");
        }
    }

    proptest::proptest! {
        /// Lists and files that anybody may have written.
        #[test]
        fn any_text_is_a_list_of_hosts_or_an_error(
            text in "(?s)([a-z@.:\\[\\]0-9 ,#=\n-]|slots=|.){0,40}",
        ) {
            for list in [text.parse::<HostList>(), HostList::of_file(&text)].into_iter().flatten() {
                let total: usize = list.0.iter().map(|host| host.ranks).sum();
                proptest::prop_assert!((1..=RANKS_MAX).contains(&total));
                // ssh would take it for an option.
                proptest::prop_assert!(list.0.iter().all(|host| !host.name.starts_with('-')));
            }
        }
    }
}
