//! The addresses of this host's network interfaces, where ranks of other hosts may reach it.

use std::ffi::CStr;
use std::net::IpAddr;

use crate::rendezvous::Lookup;

/// NCCL's variable, which chooses interfaces here, too: `eth,ib0` by how names begin, `=eth0` by
/// whole names, `^docker` all but these.
const INTERFACES: &str = "NCCL_SOCKET_IFNAME";

/// More addresses of one host would not fit into what ranks tell each other.
const ADDRESSES_MAX: usize = 64;

/// The addresses of the interfaces that are up, or of those that the user has chosen. Those of the
/// loopback interface only if there are no others.
pub(crate) fn own_addresses(lookup: Lookup<'_>) -> Vec<IpAddr> {
    let chosen = lookup(INTERFACES).unwrap_or_default();
    let all = interfaces().into_iter();
    let all = all.filter(|(name, _)| is_chosen(name, &chosen));
    let all: Vec<IpAddr> = all.map(|(_, address)| address).collect();
    let others = all.iter().copied().filter(|it| !it.is_loopback());
    let others: Vec<IpAddr> = others.take(ADDRESSES_MAX).collect();
    if others.is_empty() { all } else { others }
}

fn is_chosen(name: &str, chosen: &str) -> bool {
    let (is_excluded, rest) = match chosen.strip_prefix('^') {
        Some(rest) => (true, rest),
        None => (false, chosen),
    };
    let (is_whole, names) = match rest.strip_prefix('=') {
        Some(names) => (true, names),
        None => (false, rest),
    };
    let is_named = |it: &str| name == it || !is_whole && name.starts_with(it);
    let names = names.split(',').filter(|it| !it.is_empty());
    names.clone().count() == 0 || names.clone().any(is_named) != is_excluded
}

/// Name and address of each interface that is up, without addresses that mean nothing elsewhere.
fn interfaces() -> Vec<(String, IpAddr)> {
    let (mut first, mut all) = (std::ptr::null_mut(), Vec::new());
    // SAFETY: the call gives a list, which is read and given back as its manual says; the family of
    // an address says which type it has.
    unsafe {
        if libc::getifaddrs(&mut first) != 0 {
            return all;
        }
        let mut next = first;
        while let Some(it) = next.as_ref() {
            next = it.ifa_next;
            let is_up = it.ifa_flags & libc::IFF_UP as u32 != 0;
            let Some(address) = it.ifa_addr.as_ref().filter(|_| is_up) else {
                continue;
            };
            let address = match i32::from(address.sa_family) {
                libc::AF_INET => {
                    let it = &*it.ifa_addr.cast::<libc::sockaddr_in>();
                    IpAddr::from(it.sin_addr.s_addr.to_ne_bytes())
                }
                libc::AF_INET6 => {
                    let it = &*it.ifa_addr.cast::<libc::sockaddr_in6>();
                    IpAddr::from(it.sin6_addr.s6_addr)
                }
                _ => continue,
            };
            if !matches!(address, IpAddr::V6(it) if it.is_unicast_link_local()) {
                let name = CStr::from_ptr(it.ifa_name).to_string_lossy();
                all.push((name.into_owned(), address));
            }
        }
        libc::freeifaddrs(first);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_choose_interfaces_as_nccl_s_variable_does() {
        let names = ["eth0", "eth1", "ib0", "docker0"];
        let chosen = |text: &str| {
            let all = names.into_iter().filter(|name| is_chosen(name, text));
            all.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(chosen(""), "eth0 eth1 ib0 docker0");
        assert_eq!(chosen("eth,ib0"), "eth0 eth1 ib0");
        assert_eq!(chosen("=eth"), "");
        assert_eq!(chosen("=eth1,ib0"), "eth1 ib0");
        assert_eq!(chosen("^docker"), "eth0 eth1 ib0");
        assert_eq!(chosen("^=eth0"), "eth1 ib0 docker0");
    }

    #[test]
    fn every_host_has_an_address_and_a_choice_is_kept_to() {
        let all = own_addresses(&|_| None);
        assert!(!all.is_empty());
        let loopback = own_addresses(&|_| Some("=lo".into()));
        assert!(loopback.iter().all(IpAddr::is_loopback), "{loopback:?}");
        assert!(own_addresses(&|_| Some("=no such".into())).is_empty());
    }
}
