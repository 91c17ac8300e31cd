//! The report of a race: the bytes, both operations, and what would have ordered them.

use std::fmt::Write;

use super::{Kind, finding};
use crate::machine::Machine;
use crate::race::{OperationId, Race};
use crate::stream;

/// Reports a race.
pub fn race(machine: &mut Machine, race: &Race) {
    let verb = |writes: bool, atomic: bool| match (atomic, writes) {
        (true, _) => "updates (atomically)",
        (false, true) => "writes",
        (false, false) => "reads",
    };
    let mut message = format!(
        "two operations touch the same bytes, and nothing orders them\n  bytes: {}",
        machine.memory.describe(&race.range)
    );
    one(
        machine,
        &mut message,
        "one",
        verb(race.first_writes, race.first_atomic),
        race.first,
    );
    one(
        machine,
        &mut message,
        "the other",
        verb(race.second_writes, race.second_atomic),
        race.second,
    );
    message.push_str(
        "\n  way out: an event recorded behind the first and waited for before the second, or both in one stream",
    );
    finding(machine, Kind::Race, message);
}

fn one(machine: &Machine, message: &mut String, which: &str, verb: &str, operation: OperationId) {
    let written = match stream::operation(machine, operation) {
        Some(operation) => {
            let captured = operation
                .captured
                .as_ref()
                .map_or_else(String::new, |captured| {
                    format!("\n    captured by {}", captured.stack)
                });
            write!(
                message,
                "\n  {which} {verb} them: {operation}\n    called by {}{captured}",
                operation.stack
            )
        }
        None => {
            write!(
                message,
                "\n  {which} {verb} them: operation {operation}, which was too long ago to be remembered"
            )
        }
    };
    written.expect("writing to a string does not fail");
}
