//! Runs the PTX that NVIDIA's compiler makes of kernels, thread by thread, on the host; reports
//! what the ISA forbids. See README.md.

mod access;
mod decode;
mod dense;
mod finding;
mod lanes;
mod launch;
mod memory;
mod moment;
mod names;
mod number;
mod op;
mod order;
mod pointers;
mod products;
mod shared;
mod state;
mod tensor;
mod text;
mod warp;
mod wgmma;

pub use dense::{Dense, Element};
pub use finding::{Finding, Kind, Refusal};
pub use launch::{Counts, Launch, Outcome};
pub use memory::{Footprint, GlobalMemory, Shadows, Window};

/// A module of PTX. Its kernels are decoded one by one.
#[derive(Debug)]
pub struct Module {
    text: text::Text,
}

/// A kernel, ready to run.
#[derive(Debug)]
pub struct Kernel {
    program: decode::Program,
    files: Vec<(u32, String)>,
}

impl Module {
    /// Reads the text of a module.
    pub fn parse(text: &str) -> Result<Module, Refusal> {
        Ok(Module {
            text: text::read(text)?,
        })
    }

    /// The names of its kernels.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.text.kernels.iter().map(|kernel| kernel.name.as_str())
    }

    /// The architecture that it is for: 90 and `a` for `sm_90a`.
    pub fn target(&self) -> Option<(u32, &str)> {
        let target = self.text.target.strip_prefix("sm_")?;
        let digits = target.trim_end_matches(|c: char| !c.is_ascii_digit());
        Some((digits.parse().ok()?, &target[digits.len()..]))
    }

    /// Decodes a kernel; an error names what of it is not simulated. None if there is no such
    /// kernel.
    pub fn kernel(&self, name: &str) -> Option<Result<Kernel, Refusal>> {
        let kernel = self
            .text
            .kernels
            .iter()
            .find(|kernel| kernel.name == name)?;
        Some(
            decode::decode(kernel, &self.text.variables).map(|program| Kernel {
                program,
                files: self.text.files.clone(),
            }),
        )
    }
}

impl Kernel {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.program.name
    }

    /// The sizes of its parameters in bytes.
    pub fn parameters(&self) -> impl Iterator<Item = u64> {
        self.program.parameters.iter().map(|(_, bytes)| *bytes)
    }

    /// The most threads that a block may have, if it says so.
    pub fn threads_max(&self) -> Option<u32> {
        self.program.threads_max
    }

    /// Bytes of shared memory that a block has, besides what a launch adds.
    pub fn static_shared_bytes(&self) -> u64 {
        self.program.shared_bytes()
    }

    /// Whether it takes pointers from memory or puts them there. Else each pointer among its
    /// arguments may be any address that leads to the same bytes.
    pub fn holds_pointers(&self) -> bool {
        self.program.holds_pointers
    }

    /// Runs a launch to its end or to the first mistake.
    pub fn run(
        &self,
        launch: &Launch,
        memory: &dyn GlobalMemory,
        shadows: &mut Shadows,
    ) -> Outcome {
        let teller = launch::Teller {
            program: &self.program,
            files: &self.files,
        };
        launch::run(&teller, launch, memory, shadows)
    }
}
