//! `ddp-train doctor`: is all there that training needs, and what mends what is missing. Alone it looks at this machine, under `mpirun` at
//! every host and rank of the job, and at what is between them.
//!
//! Each rank brings findings: `look.rs` what can be seen, `measure.rs` what has to be tried. Rank 0 tells all of them, what is of a whole
//! host once. Something bad is an error with exit code 69.

mod finding;
mod look;
mod measure;

use std::fmt::Display;

use ddp_comm::World;
use serde::{Deserialize, Serialize};

use self::finding::Finding;
use crate::cli::DoctorFlags;
use crate::error::{Error, Result};

/// What one rank has found.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Found {
    /// Of its host: told by the first rank there.
    of_host: Vec<Finding>,
    /// Its own.
    of_rank: Vec<Finding>,
}

/// Looks at this machine, as all ranks of `world` see it.
pub fn examine(
    flags: &DoctorFlags,
    world: &World,
    say: &mut dyn FnMut(&dyn Display) -> Result<()>,
) -> Result<()> {
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
        found.of_rank.extend(measure::rank(&devices, world));
    }
    let mine = serde_json::to_vec(&found)
        .map_err(|error| Error::Internal(format!("findings: {error}")))?;
    let all = world.all_gather_bytes(&mine)?;
    let hosts = world.all_gather_bytes(world.host().as_bytes())?;
    let mut of_job = vec![look::assignment(&devices, world.size())];
    if !flags.quick && world.size() > 1 {
        of_job.push(measure::reductions(&devices, world)?);
    }
    let mut told = Telling {
        say,
        json: flags.json,
        counts: [0; 3],
    };
    for (rank, (found, host)) in all.iter().zip(&hosts).enumerate() {
        let found: Found = serde_json::from_slice(found).map_err(|error| {
            Error::Internal(format!("findings of rank {rank} do not read back: {error}"))
        })?;
        let host = String::from_utf8_lossy(host);
        told.part(&format!("host {host}"), &found.of_host)?;
        told.part(&format!("rank {rank} on {host}"), &found.of_rank)?;
    }
    told.part("the job", &of_job)?;
    told.end()
}

/// Says findings, and counts them.
struct Telling<'a> {
    say: &'a mut dyn FnMut(&dyn Display) -> Result<()>,
    json: bool,
    counts: [usize; 3],
}

impl Telling<'_> {
    fn part(&mut self, of: &str, findings: &[Finding]) -> Result<()> {
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

    /// The verdict: an error if something is bad.
    fn end(self) -> Result<()> {
        let [fine, notes, bad] = self.counts;
        let counts = format!("{fine} fine, {notes} to note, {bad} bad");
        if self.json {
            let verdict = serde_json::json!({ "healthy": bad == 0, "fine": fine, "notes": notes, "bad": bad });
            (self.say)(&verdict)?;
        }
        if bad > 0 {
            return Err(Error::Unhealthy(format!(
                "doctor: {counts}. Mend what is marked BAD: the line behind it says how"
            )));
        }
        if self.json {
            Ok(())
        } else {
            (self.say)(&format!("healthy: {counts}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(findings: &[Finding], json: bool) -> (Result<()>, String) {
        let mut text = String::new();
        let mut say = |line: &dyn Display| {
            text += &format!("{line}\n");
            Ok(())
        };
        let mut telling = Telling {
            say: &mut say,
            json,
            counts: [0; 3],
        };
        telling.part("host a", findings).unwrap();
        let end = telling.end();
        (end, text)
    }

    #[test]
    fn something_bad_is_an_error_and_a_note_is_none() {
        let findings = [
            Finding::fine("cpu", "8 cores"),
            Finding::note("shm", "small", "make it larger"),
        ];
        let (end, text) = told(&findings, false);
        end.unwrap();
        assert!(
            text.contains("-> make it larger")
                && text.ends_with("healthy: 1 fine, 1 to note, 0 bad\n"),
            "{text}"
        );
        let error = told(&[Finding::bad("disk", "full", "rm")], false)
            .0
            .unwrap_err();
        assert_eq!(error.exit_code(), 69);
    }

    #[test]
    fn json_has_a_line_a_finding() {
        let (end, text) = told(&[Finding::fine("cpu", "8 \"cores\"")], true);
        end.unwrap();
        let lines: Vec<serde_json::Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(
            (&lines[0]["of"], &lines[0]["health"], &lines[1]["healthy"]),
            (&"host a".into(), &"fine".into(), &true.into())
        );
        // Whoever reads lines alone learns of the end from the last one, too.
        let (end, text) = told(&[Finding::bad("disk", "full", "rm")], true);
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
