//! Memory that was never freed: a finding at the end of the process, for `SIMCUDA_LEAKS=1`.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::machine::Machine;

/// Allocations that no call freed, by the call that made them, the largest first.
pub fn message(machine: &Machine) -> Option<String> {
    // What made them, from where: how many, and how many bytes.
    let mut groups: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for allocation in machine
        .memory
        .allocations
        .values()
        .filter(|allocation| allocation.end().is_none())
    {
        let place = allocation
            .owner
            .device()
            .map_or_else(String::new, |device| format!(" on device {device}"));
        let made = &allocation.made;
        let (count, bytes) = groups
            .entry(format!("{}{place}\n    {}", made.by, made.stack))
            .or_default();
        *count += 1;
        *bytes += allocation.bytes();
    }
    let (count, bytes) = groups
        .values()
        .fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
    if count == 0 {
        return None;
    }
    let mut sorted: Vec<(&String, &(u64, u64))> = groups.iter().collect();
    sorted.sort_by_key(|(_, (_, bytes))| std::cmp::Reverse(*bytes));
    let mut message = format!("{bytes} bytes in {} were never freed", counted(count));
    for (made, (count, bytes)) in sorted {
        write!(
            message,
            "\n  {bytes} bytes in {} made by {made}",
            counted(*count)
        )
        .expect("writing to a string does not fail");
    }
    Some(message)
}

fn counted(count: u64) -> String {
    if count == 1 {
        "1 allocation".to_owned()
    } else {
        format!("{count} allocations")
    }
}
