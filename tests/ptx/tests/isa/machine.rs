//! Memory and launches for these tests.

use std::cell::RefCell;
use std::ops::Range;

use ddp_ptx::{Finding, Launch, Module, Overlay, Source};

/// Where the only allocation begins.
pub(crate) const START: u64 = 0x10_0000;

/// One allocation.
pub(crate) struct Memory(pub(crate) RefCell<Vec<u8>>);

impl Source for Memory {
    fn allocation(&self, _: u64) -> Option<Range<u64>> {
        Some(START..START + self.0.borrow().len() as u64)
    }

    fn read(&self, address: u64, to: &mut [u8]) {
        let start = (address - START) as usize;
        to.copy_from_slice(&self.0.borrow()[start..start + to.len()]);
    }
}

pub(crate) const HEAD: &str = ".version 9.0\n.target sm_90\n.address_size 64\n";

/// Runs kernel `k`, whose one parameter is the address of `memory`; what it wrote is in it
/// afterwards.
pub(crate) fn launch(text: &str, memory: &mut Vec<u8>, launch: &Launch) -> Result<(), Finding> {
    let module = Module::parse(text).unwrap_or_else(|refusal| panic!("{refusal}\n{text}"));
    let kernel = module.kernel("k").expect("the test has it");
    let kernel = kernel.unwrap_or_else(|refusal| panic!("{refusal}\n{text}"));
    let source = Memory(RefCell::new(std::mem::take(memory)));
    let mut overlay = Overlay::new(&source);
    let launch = Launch {
        arguments: vec![START.to_le_bytes().to_vec()],
        ..launch.clone()
    };
    let result = kernel.run(&launch, &mut overlay);
    let written: Vec<(u64, Vec<u8>)> = overlay
        .written()
        .map(|(at, bytes)| (at, bytes.to_vec()))
        .collect();
    *memory = source.0.into_inner();
    for (at, bytes) in written {
        let start = (at - START) as usize;
        memory[start..start + bytes.len()].copy_from_slice(&bytes);
    }
    result.map(drop)
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
