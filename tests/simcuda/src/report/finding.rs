//! Reporting: a finding in words, or a race with its bytes and both operations.

use std::fmt::Write;

use super::FindingKind;
use crate::handle::OperationId;
use crate::machine::Machine;
use crate::race::Race;
use crate::stream;

/// Reports a finding. With `SIMCUDA_ON_FINDING=exit` it does not return; otherwise the caller
/// continues as the driver would.
pub fn finding(machine: &mut Machine, kind: FindingKind, message: impl AsRef<str>) {
    machine.report.tell(kind, message.as_ref());
}

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
        "\n  help: an event recorded behind the first and waited for before the second, or both in one stream",
    );
    finding(machine, FindingKind::Race, message);
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
