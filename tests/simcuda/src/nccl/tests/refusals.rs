//! Wrong arguments: the code, and a text that says what was expected.

use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;

use super::bench::*;
use super::groups::Local;
use crate::machine::testing::{cases, device};
use crate::nccl::calls::*;
use crate::nccl::comm_calls::*;
use crate::nccl::entry::{ncclGetErrorString, ncclGetVersion};

const THREE: (&str, &str) = ("SIMCUDA_DEVICES", "3");

#[track_caller]
fn refused(result: c_int, code: c_int, text: &str) {
    assert_eq!(result, code, "{}", last_error());
    assert!(
        last_error().contains(text),
        "`{text}` is not in: {}",
        last_error()
    );
}

fn try_init(ranks: c_int, id: UniqueIdByValue, rank: c_int) -> c_int {
    ncclCommInitRank(Some(&mut MaybeUninit::uninit()), ranks, id, rank)
}

cases! {
    arguments_are_checked_and_told, [THREE], {
        let local = Local::new();
        let buffers = local.upload(|_| vec![1.0; 64]);
        let (comm, stream, at) = (local.comms[0], local.streams[0], buffers[0] as *mut std::ffi::c_void);
        refused(ncclAllReduce(at, at, 64, F32, 4, comm, stream), 4, "ncclAvg is not simulated");
        refused(ncclAllReduce(at, at, 64, F32, 5, comm, stream), 4, "op 5: expected 0 to 3");
        refused(ncclAllReduce(at, at, 64, 10, SUM, comm, stream), 4, "datatype 10: expected 0 to 9");
        refused(ncclAllReduce(std::ptr::null(), at, 64, F32, SUM, comm, stream), 4, "sendbuff is null");
        refused(ncclAllReduce(at, std::ptr::null_mut(), 64, F32, SUM, comm, stream), 4, "recvbuff is null");
        refused(ncclAllReduce(at, at, usize::MAX, F32, SUM, comm, stream), 4, "more than there can be");
        refused(ncclBroadcast(at, at, 64, F32, 3, comm, stream), 4, "root 3: expected a rank, 0 to 2");
        refused(ncclSend(at, 64, F32, -1, comm, stream), 4, "peer -1: expected a rank, 0 to 2");
        refused(ncclAllReduce(at.wrapping_byte_add(2), at, 8, F32, SUM, comm, stream), 4, "is not the address of an f32");
        refused(ncclAllReduce(at, at, 64, F32, SUM, std::ptr::null_mut(), stream), 4, "the communicator is none");
        refused(ncclCommCount(comm, None), 4, "no place");
        done(ncclAllReduce(at, at, 0, F32, SUM, comm, stream));
        local.synchronize();
        local.end();
    }, |ended| ended.is_clean();

    a_communicator_says_what_it_is, [THREE], {
        let local = Local::new();
        for (rank, comm) in local.comms.iter().copied().enumerate() {
            let mut told = [0; 4];
            let [count, device, own, error] = &mut told;
            done(ncclCommCount(comm, Some(count)));
            done(ncclCommCuDevice(comm, Some(device)));
            done(ncclCommUserRank(comm, Some(own)));
            done(ncclCommGetAsyncError(comm, Some(error)));
            assert_eq!(told, [3, rank as c_int, rank as c_int, 0]);
        }
        let mut version = 0;
        done(ncclGetVersion(Some(&mut version)));
        assert!((22000..23000).contains(&version), "{version}");
        // SAFETY: the text is of this library, and ends in zero.
        assert_eq!(unsafe { CStr::from_ptr(ncclGetErrorString(0)) }, c"no error");
        local.end();
    }, |ended| ended.is_clean();

    what_a_rank_says_of_itself_is_checked, [THREE], {
        let id = new_id();
        refused(try_init(2, id, 0), 5, "no context is current on this thread");
        device(0);
        refused(try_init(0, id, 0), 4, "0 ranks: 1 to 64 are simulated");
        refused(try_init(2, id, 2), 4, "rank 2 of 2 ranks");
        refused(try_init(1, UniqueIdByValue { internal: [7; 128] }, 0), 2, "is not one that ncclGetUniqueId");
        let comm = init(1, id, 0);
        refused(try_init(1, id, 0), 2, "the id was used before");
        done(ncclCommDestroy(comm));
        // By now the number of that file may be another one's, which must not be touched.
        let number = i32::from_le_bytes(id.internal[12..16].try_into().expect("four bytes"));
        let path = std::env::temp_dir().join(format!("simcuda-other-file-{}", std::process::id()));
        let other = std::fs::File::options().read(true).write(true).create_new(true).open(&path).expect("a file");
        // SAFETY: the number is of no file of this process: the communicator has closed it, and
        // only this thread opens any.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);
        refused(try_init(1, id, 0), 2, "cannot be reached");
        assert_eq!(other.metadata().expect("it is open").len(), 0);
        std::fs::remove_file(path).expect("it is there");
    }, |ended| ended.is_clean();

    a_configuration_is_checked, [THREE], {
        device(0);
        // NCCL_CONFIG_INITIALIZER of 2.27 as far as it is read: size, magic number, version,
        // blocking.
        let config = |magic: u32, version: u32, blocking: i32| {
            let mut words = [0u64; 16];
            words[0] = 128;
            words[1] = u64::from(magic) | u64::from(version) << 32;
            words[2] = u64::from(blocking as u32);
            words
        };
        let init = |words: &[u64; 16]| {
            let mut comm = MaybeUninit::uninit();
            // SAFETY: the words are those of a configuration, and more than are read.
            let config = unsafe { &*words.as_ptr().cast::<Config>() };
            let code = ncclCommInitRankConfig(Some(&mut comm), 1, new_id(), 0, Some(config));
            if code == 0 {
                // SAFETY: the call has succeeded.
                done(ncclCommDestroy(unsafe { comm.assume_init() }));
            }
            code
        };
        done(init(&config(0xcafe_beef, 22707, i32::MIN)));
        done(init(&config(0xcafe_beef, 22707, 1)));
        refused(init(&config(0xcafe_beef, 22707, 0)), 4, "only blocking communicators are simulated");
        refused(init(&config(0xbeef, 22707, 1)), 4, "NCCL_CONFIG_INITIALIZER");
        refused(init(&config(0xcafe_beef, 7, 1)), 4, "of version 7");
    }, |ended| ended.is_clean();

    a_call_that_the_plan_has_fail_fails, [THREE, ("SIMCUDA_FAULTS", "ncclAllReduce@2=system_error; rank7:ncclSend@1=1")], {
        let local = Local::new();
        let buffers = local.upload(|_| vec![1.0; 64]);
        let call = |rank: usize| all_reduce(buffers[rank], buffers[rank], 64, local.comms[rank], local.streams[rank]);
        done(call(0));
        refused(call(1), 2, "fails by the plan of faults");
        done(call(1));
        done(call(2));
        local.synchronize();
        local.end();
    }, |ended| ended.is_clean();
}
