//! `ddp-train`: the program of this library, with its own model families only.

/// Bounds what the chat template of a model's folder may use.
#[global_allocator]
static MEMORY: ddp::kernels::budget::Budgeted = ddp::kernels::budget::Budgeted;

fn main() -> std::process::ExitCode {
    ddp::program("ddp-train").run()
}
