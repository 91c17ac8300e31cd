//! Cycles between the files of a crate, and between its top-level modules.

use std::collections::VecDeque;
use std::fmt::Write as _;

use crate::edges::{Edges, Parts, edges};
use crate::modules::Crate;

/// Parts that all lead back to themselves, and the text that shows how.
pub(crate) struct Cycle {
    pub(crate) parts: Vec<usize>,
    pub(crate) text: String,
}

/// The cycles of a crate, largest first.
pub(crate) fn cycles(krate: &Crate, parts: Parts) -> Vec<Cycle> {
    let edges = edges(krate, parts);
    let count = krate.modules.len(); // at least as many as files
    let mut found: Vec<Cycle> = components(count, &edges)
        .into_iter()
        .map(|members| Cycle {
            text: describe(krate, parts, &edges, &members),
            parts: members,
        })
        .collect();
    found.sort_by_key(|cycle| std::cmp::Reverse(cycle.parts.len()));
    found
}

/// Groups of at least two parts that reach each other.
fn components(count: usize, edges: &Edges) -> Vec<Vec<usize>> {
    let reach: Vec<Vec<bool>> = (0..count)
        .map(|start| {
            let mut seen = vec![false; count];
            let mut waiting = vec![start];
            while let Some(at) = waiting.pop() {
                for &(_, to) in edges.range((at, 0)..(at + 1, 0)).map(|(pair, _)| pair) {
                    if !std::mem::replace(&mut seen[to], true) {
                        waiting.push(to);
                    }
                }
            }
            seen
        })
        .collect();
    let mut taken = vec![false; count];
    let mut found = Vec::new();
    for a in 0..count {
        if taken[a] || !reach[a][a] {
            continue;
        }
        let group: Vec<usize> = (a..count).filter(|&b| reach[a][b] && reach[b][a]).collect();
        for &b in &group {
            taken[b] = true;
        }
        found.push(group);
    }
    found
}

/// The shortest way from `start` back to itself inside `members`.
fn shortest(edges: &Edges, members: &[usize], start: usize) -> Vec<usize> {
    let mut waiting = VecDeque::from([vec![start]]);
    let mut seen = Vec::new();
    while let Some(path) = waiting.pop_front() {
        let at = path[path.len() - 1];
        for &(_, to) in edges.range((at, 0)..(at + 1, 0)).map(|(pair, _)| pair) {
            if to == start {
                return path;
            }
            if members.contains(&to) && !seen.contains(&to) {
                seen.push(to);
                let mut longer = path.clone();
                longer.push(to);
                waiting.push_back(longer);
            }
        }
    }
    Vec::new()
}

fn describe(krate: &Crate, parts: Parts, edges: &Edges, members: &[usize]) -> String {
    let file = |file: usize| krate.files[file].display().to_string();
    let (what, show): (_, &dyn Fn(usize) -> String) = match parts {
        Parts::Files => ("files", &file),
        Parts::TopLevelModules => ("top-level modules", &|part| krate.name(part).to_owned()),
    };
    let mut text = format!("cycle of {} {what}\n", members.len());
    let ring = members
        .iter()
        .map(|&start| shortest(edges, members, start))
        .min_by_key(Vec::len)
        .unwrap_or_default();
    text.push_str("  shortest:\n");
    for (at, &from) in ring.iter().enumerate() {
        let to = ring[(at + 1) % ring.len()];
        let (name, &(user, line)) = edges[&(from, to)]
            .iter()
            .next()
            .expect("an edge has a name");
        let (user, to) = (file(user), show(to));
        let _ = writeln!(text, "    {user}:{line} uses {name} of {to}");
    }
    let _ = writeln!(text, "  all uses between these {what}:");
    for ((from, to), names) in edges {
        if members.contains(from) && members.contains(to) {
            let names: Vec<String> = names
                .iter()
                .map(|(name, &(user, line))| match parts {
                    Parts::Files => name.clone(),
                    Parts::TopLevelModules => format!("{name} ({}:{line})", file(user)),
                })
                .collect();
            let (from, to) = (show(*from), show(*to));
            let _ = writeln!(text, "    {from} -> {to}: {}", names.join(", "));
        }
    }
    text
}
