//! Memory and launches for these tests.

use std::ops::Range;

use ddp_ptx::{Finding, GlobalMemory, Kind, Launch, Module, Outcome, Shadows, Window};

/// Where the only allocation begins.
pub(crate) const START: u64 = 0x10_0000;

/// Where the same allocation is found, too.
pub(crate) const AGAIN: u64 = 0x20_0000;

/// One allocation.
pub(crate) struct Memory {
    data: *mut u8,
    bytes: u64,
    /// What nothing has written, counted from its start.
    unwritten: Option<Range<u64>>,
}

impl Memory {
    pub(crate) fn new(memory: &mut [u8], unwritten: Option<Range<u64>>) -> Memory {
        Memory {
            data: memory.as_mut_ptr(),
            bytes: memory.len() as u64,
            unwritten,
        }
    }

    fn content(&self) -> Vec<u8> {
        // SAFETY: the vector that `new` got has so many bytes; no launch runs.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes as usize) }.to_vec()
    }

    fn fill(&self, content: &[u8]) {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), self.data, content.len()) };
    }
}

// SAFETY: the vector that `new` got is borrowed by the functions below until the launch is over.
unsafe impl GlobalMemory for Memory {
    fn find(&self, address: u64) -> Option<Window> {
        [START, AGAIN].into_iter().find_map(|start| {
            let range = start..start + self.bytes;
            range.contains(&address).then_some(Window {
                range,
                start: START,
                data: self.data,
            })
        })
    }

    fn unwritten(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let part = self.unwritten.clone()?;
        let start = (START + part.start).max(range.start);
        let end = (START + part.end).min(range.end);
        (start < end).then_some(start..end)
    }
}

pub(crate) const HEAD: &str = ".version 9.0\n.target sm_90\n.address_size 64\n";

/// Runs kernel `k`, whose parameters are the address of `memory` and, if it has a second, another
/// address of it.
pub(crate) fn run(
    text: &str,
    memory: &mut [u8],
    launch: &Launch,
    shadows: &mut Shadows,
) -> Outcome {
    run_on(text, &Memory::new(memory, None), launch, shadows)
}

pub(crate) fn run_on(
    text: &str,
    memory: &Memory,
    launch: &Launch,
    shadows: &mut Shadows,
) -> Outcome {
    let module = Module::parse(text).unwrap_or_else(|refusal| panic!("{refusal}\n{text}"));
    let kernel = module.kernel("k").expect("the test has it");
    let kernel = kernel.unwrap_or_else(|refusal| panic!("{refusal}\n{text}"));
    let addresses = [START, AGAIN].map(|address| address.to_le_bytes().to_vec());
    let count = kernel.parameters().count();
    let launch = Launch {
        arguments: addresses.into_iter().take(count.clamp(1, 2)).collect(),
        compared_max: u64::MAX,
        ..launch.clone()
    };
    let before = memory.content();
    let uncompared = Launch {
        compared_max: 0,
        ..launch.clone()
    };
    let uncompared = kernel.run(&uncompared, memory, &mut Shadows::default());
    let left = memory.content();
    memory.fill(&before);
    let outcome = kernel.run(&launch, memory, shadows);
    assert_same(&outcome, &uncompared, memory.content() == left);
    outcome
}

/// A launch whose accesses are not compared does the same, and makes the same mistakes but for
/// those that are found by comparing.
fn assert_same(outcome: &Outcome, uncompared: &Outcome, left_the_same: bool) {
    match (&outcome.result, &uncompared.result) {
        (Ok(_), Ok(_)) => assert!(left_the_same),
        (Err(finding), Err(other)) if finding.kind == other.kind => {
            assert_eq!(finding.to_string(), other.to_string());
        }
        (Err(finding), other) => assert!(
            matches!(
                finding.kind,
                Kind::Race | Kind::Copy | Kind::Flight | Kind::Fence | Kind::ReadOnly
            ),
            "{finding}, and uncompared {other:?}"
        ),
        (Ok(_), Err(other)) => panic!("only uncompared: {other}"),
    }
}

/// Runs kernel `k`; what it wrote is in `memory` afterwards.
pub(crate) fn launch(text: &str, memory: &mut [u8], launch: &Launch) -> Result<(), Finding> {
    run(text, memory, launch, &mut Shadows::default())
        .result
        .map(drop)
}

/// A kernel `k` of this body, in which %rd0 is the address of memory, with enough registers.
pub(crate) fn kernel(variables: &str, body: &str) -> String {
    format!(
        "{HEAD}.visible .entry k(\n\t.param .u64 k_param_0\n)\n{{\n\t.reg .pred %p<20>;\n\t.reg .b16 %h<20>;\n\t\
         .reg .b32 %r<40>;\n\t.reg .b64 %rd<20>;\n{variables}\n\tld.param.u64 %rd0, [k_param_0];\n{body}\n\tret;\n}}\n"
    )
}

/// One block of so many threads.
pub(crate) fn threads(count: u32) -> Launch {
    Launch {
        grid: [1, 1, 1],
        block: [count, 1, 1],
        ..Launch::default()
    }
}

/// Memory of words of 32 bits.
pub(crate) fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}

/// What a kernel of this body makes of the words, where thread i has the address of word i in %rd1
/// and its number in %r0.
pub(crate) fn per_thread(
    count: u32,
    variables: &str,
    body: &str,
    words: &[u32],
) -> Result<Vec<u32>, Finding> {
    let prologue =
        "\tmov.u32 %r0, %tid.x;\n\tmul.wide.u32 %rd1, %r0, 4;\n\tadd.s64 %rd1, %rd0, %rd1;\n";
    let mut memory = bytes_of(words);
    launch(
        &kernel(variables, &format!("{prologue}{body}")),
        &mut memory,
        &threads(count),
    )?;
    Ok(words_of(&memory))
}
