//! What went wrong in a launch, in words.

use crate::decode::Program;
use crate::finding::{Fault, Finding};
use crate::moment::{Other, Who, is_of_block, who_of};
use crate::order::Order;
use crate::state::Site;

/// What went wrong, in words.
pub(crate) struct Teller<'a> {
    pub(crate) program: &'a Program,
    pub(crate) files: &'a [(u32, String)],
}

impl Teller<'_> {
    fn source(&self, at: u32) -> Option<String> {
        let (file, line) = self.program.code.get(at as usize)?.source;
        let (_, name) = self.files.iter().find(|(number, _)| *number == file)?;
        Some(format!("{name}:{line}"))
    }

    fn line(&self, at: u32) -> u32 {
        let coded = self.program.code.get(at as usize);
        coded.map_or(0, |coded| coded.line)
    }

    pub(super) fn finding(
        &self,
        site: &Site,
        thread: u32,
        at: u32,
        fault: Fault,
        order: &Order,
    ) -> Finding {
        let mut message = fault.message;
        let mut access = None;
        if let Some(detail) = fault.detail {
            access = detail.bytes.map(|bytes| Box::new((bytes, detail.does)));
            if let Some(other) = detail.other {
                message.push_str(&self.beside(site, &other, order));
            }
        }
        Finding {
            kind: fault.kind,
            kernel: self.program.name.clone(),
            line: self.line(at),
            source: self.source(at),
            block: site.at,
            thread: thread_at(site, thread),
            message,
            access,
        }
    }

    /// The other side of a race.
    fn beside(&self, site: &Site, other: &Other, order: &Order) -> String {
        let block = place_of(order.block_of(other.stamp), site.grid);
        let who = match who_of(other.stamp) {
            Who::Thread(thread) => {
                let thread = triple(thread_at(site, thread));
                format!("thread {thread} of block {}", triple(block))
            }
            Who::Warp(warp) => format!("several threads of warp {warp} of block {}", triple(block)),
            Who::Block => format!("several threads of block {}", triple(block)),
            Who::Blocks => "threads of several blocks".to_owned(),
        };
        let place = match self.source(other.at) {
            Some(source) => format!(" at {source}"),
            None => format!(" in line {} of its PTX", self.line(other.at)),
        };
        let missing = if is_of_block(other.stamp) && block == site.at {
            "no barrier is between them"
        } else {
            "nothing orders the blocks of a launch"
        };
        format!(", {who} {} some of them{place}, and {missing}", other.does)
    }
}

fn triple([x, y, z]: [u32; 3]) -> String {
    format!("({x}, {y}, {z})")
}

/// The index of the thread of this number in its block.
fn thread_at(site: &Site, thread: u32) -> [u32; 3] {
    let [x, y, _] = site.block;
    [thread % x, thread / x % y, thread / x / y]
}

/// The index of the block of this number.
pub(super) fn place_of(number: u64, grid: [u32; 3]) -> [u32; 3] {
    let (x, y) = (u64::from(grid[0]), u64::from(grid[1]));
    [
        (number % x) as u32,
        (number / x % y) as u32,
        (number / x / y) as u32,
    ]
}
