//! `ddp-train doctor`: whether a machine has what training needs, and how to fix what is missing.
//! Under `mpirun` it checks every host and rank of the job and the links between them.
//!
//! Each rank collects findings: `look.rs` inspects, `measure.rs` measures. Rank 0 prints all of
//! them; findings about a host are printed once. A problem that prevents training is an error with
//! exit code 69.

mod finding;
mod look;
mod measure;

use std::path::Path;

use ddp_comm::World;
use serde::{Deserialize, Serialize};
use serde_json::json;

use self::finding::{Finding, Health};
use crate::error::{Error, Result};
use crate::exchange;
use crate::output::Say;

/// The findings of one rank.
#[derive(Debug, Serialize, Deserialize)]
struct RankFindings {
    host: String,
    /// About its host, from the first rank there.
    of_host: Vec<Finding>,
    /// About itself.
    of_rank: Vec<Finding>,
}

/// Examines the machines of all ranks of `world`, and the disk of the folder `out`. If `quick`,
/// measures nothing.
pub fn examine(out: &Path, quick: bool, json: bool, world: &World, say: Say<'_>) -> Result<()> {
    let (mut of_host, mut of_rank) = (Vec::new(), look::rank(world));
    if world.local_rank() == 0 {
        of_host = look::host(out);
        of_host.extend(look::cuda(world.size()));
        if !quick {
            of_host.push(measure::disk(out));
        }
    }
    let (mine, assignment) = look::devices(world)?;
    if !quick {
        of_rank.extend(measure::rank(mine));
    }
    let host = world.host().to_string();
    let found = RankFindings {
        host,
        of_host,
        of_rank,
    };
    let all = exchange::gather(world, &found)?;
    let mut of_job = vec![assignment];
    if !quick && world.size() > 1 {
        of_job.push(measure::reductions(mine, world)?);
    }
    let mut of_all = Vec::new();
    for (
        rank,
        RankFindings {
            host,
            of_host,
            of_rank,
        },
    ) in all.into_iter().enumerate()
    {
        of_all.push((format!("host {host}"), of_host));
        of_all.push((format!("rank {rank} on {host}"), of_rank));
    }
    of_all.push(("the job".into(), of_job));
    print(&of_all, json, say)
}

/// Prints findings and what they are about, then their counts. An error if something is bad.
fn print(all: &[(String, Vec<Finding>)], json: bool, say: Say<'_>) -> Result<()> {
    for (of, findings) in all.iter().filter(|(_, findings)| !findings.is_empty()) {
        if !json {
            say(&format!("{of}:"))?;
        }
        for finding in findings {
            if json {
                let mut line = json!(finding);
                line["of"] = json!(of);
                say(&line)?;
            } else {
                say(&format!("  {finding}"))?;
            }
        }
    }
    let findings = || all.iter().flat_map(|(_, findings)| findings);
    let count = |health| findings().filter(|it| it.health == health).count();
    let [fine, notes, bad] = [Health::Fine, Health::Note, Health::Bad].map(count);
    let counts = format!("{fine} ok, {notes} with a note, {bad} bad");
    if json {
        say(&json!({ "healthy": bad == 0, "fine": fine, "notes": notes, "bad": bad }))?;
    } else if bad == 0 {
        say(&format!("healthy: {counts}"))?;
    }
    match bad {
        0 => Ok(()),
        _ => Err(Error::Unhealthy(format!(
            "doctor: {counts}; help: fix what is marked BAD, as the line after it says"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(findings: &[Finding], json: bool) -> (Result<()>, String) {
        let mut text = String::new();
        let mut say = |line: &dyn std::fmt::Display| {
            text += &format!("{line}\n");
            Ok(())
        };
        let end = print(&[("host a".into(), findings.to_vec())], json, &mut say);
        (end, text)
    }

    #[test]
    fn doctor_fails_on_problems_but_not_on_notes() {
        let findings = [
            Finding::fine("cpu", "8 cores"),
            Finding::note("shm", "small", "make it larger"),
        ];
        let (end, text) = printed(&findings, false);
        end.unwrap();
        assert!(
            text.contains("-> make it larger")
                && text.ends_with("healthy: 1 ok, 1 with a note, 0 bad\n"),
            "{text}"
        );
        let error = printed(&[Finding::bad("disk", "full", "rm")], false)
            .0
            .unwrap_err();
        assert_eq!(error.exit_code(), 69);
    }

    #[test]
    fn json_has_a_line_a_finding() {
        let (end, text) = printed(&[Finding::fine("cpu", "8 \"cores\"")], true);
        end.unwrap();
        let lines: Vec<serde_json::Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(
            (&lines[0]["of"], &lines[0]["health"], &lines[1]["healthy"]),
            (&"host a".into(), &"fine".into(), &true.into())
        );
        // The last line has the summary, also of an error.
        let (end, text) = printed(&[Finding::bad("disk", "full", "rm")], true);
        let verdict: serde_json::Value =
            serde_json::from_str(text.lines().last().unwrap()).unwrap();
        assert_eq!(
            (
                end.unwrap_err().exit_code(),
                &verdict["healthy"],
                &verdict["bad"]
            ),
            (69, &false.into(), &1.into())
        );
    }
}
