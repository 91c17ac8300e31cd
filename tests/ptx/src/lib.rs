//! Runs the PTX that NVIDIA's compiler makes of kernels, thread by thread, on the host; reports
//! what the ISA forbids. See README.md.

mod access;
mod decode;
mod finding;
mod lanes;
mod launch;
mod memory;
mod names;
mod number;
mod op;
mod products;
mod shared;
mod state;
mod tensor;
mod text;
mod warp;
mod wgmma;

pub use finding::{Finding, Kind, Refusal};
pub use launch::{Counts, Launch};
pub use memory::{Overlay, Source};

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
    /// The sizes of its parameters in bytes.
    pub fn parameters(&self) -> impl Iterator<Item = u64> {
        self.program.parameters.iter().map(|(_, bytes)| *bytes)
    }

    /// Runs a launch to its end or to the first mistake.
    pub fn run(&self, launch: &Launch, global: &mut Overlay<'_>) -> Result<Counts, Finding> {
        let teller = launch::Teller {
            program: &self.program,
            files: &self.files,
        };
        launch::run(&teller, launch, global)
    }
}
