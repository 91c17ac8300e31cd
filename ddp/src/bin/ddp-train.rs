//! `ddp-train`: the program of this library, with its own model families only.

/// Bounds what chat templates use.
#[global_allocator]
static MEMORY: ddp::kernels::budget::Budgeted = ddp::kernels::budget::Budgeted;

fn main() -> std::process::ExitCode {
    ddp::program("ddp-train").run()
}
