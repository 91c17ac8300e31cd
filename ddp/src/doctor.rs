//! `ddp-train doctor`: whether a machine has what training needs, and how to fix what is missing.
//! Under `mpirun` it checks every host and rank of the job and the links between them.
//!
//! Each rank collects findings: `look.rs` inspects, `measure.rs` measures. Rank 0 prints all of
//! them, those of a host once. A problem that prevents training is an error with exit code 69.

mod finding;
mod look;
mod measure;

use std::path::PathBuf;

use clap::Args;
use ddp_comm::World;
use serde::{Deserialize, Serialize};
use serde_json::json;

use self::finding::Finding;
use crate::config::TIMEOUT_S;
use crate::error::{Error, Result};
use crate::exchange;
use crate::flags::{PlaceFlags, number};
use crate::output::Say;

/// The flags of `doctor`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct DoctorFlags {
    /// Print lines of JSON
    #[arg(long)]
    pub json: bool,
    /// Folder for runs, whose disk is tested
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub out: PathBuf,
    /// Skip the measurements
    #[arg(long)]
    pub quick: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub places: PlaceFlags,
    /// Seconds that a rank waits for the others
    #[arg(long, value_name = "S", default_value = "60", value_parser = number(TIMEOUT_S), allow_negative_numbers = true)]
    #[arg(env = "DDP_TIMEOUT_S", hide_env_values = true)]
    pub timeout_s: f64,
}

/// The findings of one rank.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Found {
    host: String,
    /// About its host, from the first rank there.
    of_host: Vec<Finding>,
    /// About itself.
    of_rank: Vec<Finding>,
}

/// Examines the machines of all ranks of `world`.
pub fn examine(flags: &DoctorFlags, world: &World, say: Say<'_>) -> Result<()> {
    let mut found = Found::default();
    if world.local_rank() == 0 {
        found.of_host = look::host(&flags.out);
        found.of_host.extend(look::cuda(world.size()));
        if !flags.quick {
            found.of_host.push(measure::disk(&flags.out));
        }
    }
    found.of_rank = look::rank(world);
    let devices = look::devices(world)?;
    if !flags.quick {
        found.of_rank.extend(measure::rank(&devices));
    }
    found.host = world.host().to_string();
    let all = exchange::gather(world, &found)?;
    let mut of_job = vec![devices.assignment.clone()];
    if !flags.quick && world.size() > 1 {
        of_job.push(measure::reductions(&devices, world)?);
    }
    let mut printer = Printer {
        say,
        json: flags.json,
        counts: [0; 3],
    };
    for (rank, found) in all.iter().enumerate() {
        let host = &found.host;
        printer.print(&format!("host {host}"), &found.of_host)?;
        printer.print(&format!("rank {rank} on {host}"), &found.of_rank)?;
    }
    printer.print("the job", &of_job)?;
    printer.end()
}

/// Prints findings and counts them.
struct Printer<'a> {
    say: Say<'a>,
    json: bool,
    counts: [usize; 3],
}

impl Printer<'_> {
    fn print(&mut self, of: &str, findings: &[Finding]) -> Result<()> {
        if !self.json && !findings.is_empty() {
            (self.say)(&format!("{of}:"))?;
        }
        for finding in findings {
            self.counts[finding.health as usize] += 1;
            if self.json {
                let mut line = serde_json::to_value(finding).unwrap_or_default();
                line["of"] = of.into();
                (self.say)(&line)?;
            } else {
                (self.say)(&format!("  {finding}"))?;
            }
        }
        Ok(())
    }

    /// Prints the summary; an error if something is bad.
    fn end(self) -> Result<()> {
        let [fine, notes, bad] = self.counts;
        let counts = format!("{fine} ok, {notes} to note, {bad} bad");
        match (self.json, bad) {
            (true, _) => (self.say)(
                &json!({ "healthy": bad == 0, "fine": fine, "notes": notes, "bad": bad }),
            )?,
            (false, 0) => (self.say)(&format!("healthy: {counts}"))?,
            (false, _) => {}
        }
        match bad {
            0 => Ok(()),
            _ => Err(Error::Unhealthy(format!(
                "doctor: {counts}; help: fix what is marked BAD, as the line after it says"
            ))),
        }
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
        let mut printer = Printer {
            say: &mut say,
            json,
            counts: [0; 3],
        };
        printer.print("host a", findings).unwrap();
        let end = printer.end();
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
                && text.ends_with("healthy: 1 ok, 1 to note, 0 bad\n"),
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
