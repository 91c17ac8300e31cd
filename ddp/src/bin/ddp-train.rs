//! `ddp-train`: the program of this library, with its own model families only.

fn main() -> std::process::ExitCode {
    ddp::program("ddp-train").run()
}
