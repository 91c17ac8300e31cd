//! Cycles between the files of a crate.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::path::Path;

use crate::edges::{Edges, edges};
use crate::modules::{Crate, Failure};

/// Files that all lead back to themselves, and the text that shows how.
pub(crate) struct Cycle {
    pub(crate) files: Vec<usize>,
    pub(crate) text: String,
}

/// The cycles of the crate with this root file, largest first.
pub(crate) fn cycles(root: &Path) -> Result<Vec<Cycle>, Failure> {
    let krate = Crate::read(root)?;
    let edges = edges(&krate);
    let mut found: Vec<Cycle> = components(krate.files.len(), &edges)
        .into_iter()
        .map(|files| Cycle {
            text: describe(&krate, &edges, &files),
            files,
        })
        .collect();
    found.sort_by_key(|cycle| std::cmp::Reverse(cycle.files.len()));
    Ok(found)
}

/// Groups of at least two files that reach each other.
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

/// The shortest way from `start` back to itself inside `files`.
fn shortest(edges: &Edges, files: &[usize], start: usize) -> Vec<usize> {
    let mut waiting = VecDeque::from([vec![start]]);
    let mut seen = Vec::new();
    while let Some(path) = waiting.pop_front() {
        let at = path[path.len() - 1];
        for &(_, to) in edges.range((at, 0)..(at + 1, 0)).map(|(pair, _)| pair) {
            if to == start {
                return path;
            }
            if files.contains(&to) && !seen.contains(&to) {
                seen.push(to);
                let mut longer = path.clone();
                longer.push(to);
                waiting.push_back(longer);
            }
        }
    }
    Vec::new()
}

fn describe(krate: &Crate, edges: &Edges, files: &[usize]) -> String {
    let show = |file: usize| krate.files[file].display().to_string();
    let mut text = format!("cycle of {} files\n", files.len());
    let ring = files
        .iter()
        .map(|&start| shortest(edges, files, start))
        .min_by_key(Vec::len)
        .unwrap_or_default();
    text.push_str("  shortest:\n");
    for (at, &from) in ring.iter().enumerate() {
        let to = ring[(at + 1) % ring.len()];
        let (name, line) = edges[&(from, to)]
            .iter()
            .next()
            .expect("an edge has a name");
        let _ = writeln!(
            text,
            "    {}:{line} uses {name} of {}",
            show(from),
            show(to)
        );
    }
    text.push_str("  all uses between these files:\n");
    for ((from, to), names) in edges {
        if files.contains(from) && files.contains(to) {
            let names: Vec<&str> = names.keys().map(String::as_str).collect();
            let _ = writeln!(
                text,
                "    {} -> {}: {}",
                show(*from),
                show(*to),
                names.join(", ")
            );
        }
    }
    text
}
