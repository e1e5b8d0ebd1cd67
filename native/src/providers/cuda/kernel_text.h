// kernel_text.h: native/cuda/copy_pieces.cu as PTX, made by `make ptx`;
// the driver compiles it when a rail opens. Do not edit.
#pragma once

namespace asyncfabric::cuda {

inline constexpr char kKernelText[] = R"PTX(
.version 7.0
.target sm_75
.address_size 64

	// .globl	copy_pieces

.visible .entry copy_pieces(
	.param .u64 copy_pieces_param_0,
	.param .u32 copy_pieces_param_1
)
.maxntid 512, 1, 1
{
	.reg .pred 	%p<7>;
	.reg .b32 	%r<67>;
	.reg .b64 	%rd<27>;


	ld.param.u64 	%rd7, [copy_pieces_param_0];
	ld.param.u32 	%r14, [copy_pieces_param_1];
	mov.u32 	%r63, %ctaid.x;
	setp.ge.u32 	%p1, %r63, %r14;
	@%p1 bra 	$L__BB0_8;

	mov.u32 	%r15, %ntid.x;
	mul.lo.s32 	%r16, %r15, 3;
	shl.b32 	%r2, %r15, 2;
	mov.u32 	%r3, %nctaid.x;
	cvt.u64.u32 	%rd1, %r15;
	shl.b32 	%r17, %r15, 1;
	cvt.u64.u32 	%rd2, %r17;
	cvt.u64.u32 	%rd3, %r16;
	cvta.to.global.u64 	%rd4, %rd7;
	shl.b64 	%rd22, %rd2, 4;

$L__BB0_2:
	mul.wide.u32 	%rd8, %r63, 24;
	add.s64 	%rd9, %rd4, %rd8;
	ld.global.u64 	%rd5, [%rd9];
	ld.global.u64 	%rd6, [%rd9+8];
	ld.global.u64 	%rd10, [%rd9+16];
	shr.u64 	%rd11, %rd10, 4;
	cvt.u32.u64 	%r5, %rd11;
	mov.u32 	%r65, %tid.x;
	mad.lo.s32 	%r19, %r15, 3, %r65;
	setp.ge.u32 	%p2, %r19, %r5;
	@%p2 bra 	$L__BB0_5;

	mov.u32 	%r65, %tid.x;

$L__BB0_4:
	mul.wide.u32 	%rd20, %r65, 16;
	add.s64 	%rd12, %rd6, %rd20;
	// begin inline asm
	ld.global.cs.v4.u32 {%r20,%r21,%r22,%r23}, [%rd12];
	// end inline asm
	shl.b64 	%rd21, %rd1, 4;
	add.s64 	%rd13, %rd12, %rd21;
	// begin inline asm
	ld.global.cs.v4.u32 {%r24,%r25,%r26,%r27}, [%rd13];
	// end inline asm
	add.s64 	%rd14, %rd12, %rd22;
	// begin inline asm
	ld.global.cs.v4.u32 {%r28,%r29,%r30,%r31}, [%rd14];
	// end inline asm
	shl.b64 	%rd23, %rd3, 4;
	add.s64 	%rd15, %rd12, %rd23;
	// begin inline asm
	ld.global.cs.v4.u32 {%r32,%r33,%r34,%r35}, [%rd15];
	// end inline asm
	add.s64 	%rd16, %rd5, %rd20;
	// begin inline asm
	st.global.cs.v4.u32 [%rd16], {%r20,%r21,%r22,%r23};
	// end inline asm
	add.s64 	%rd17, %rd16, %rd21;
	// begin inline asm
	st.global.cs.v4.u32 [%rd17], {%r24,%r25,%r26,%r27};
	// end inline asm
	add.s64 	%rd18, %rd16, %rd22;
	// begin inline asm
	st.global.cs.v4.u32 [%rd18], {%r28,%r29,%r30,%r31};
	// end inline asm
	add.s64 	%rd19, %rd16, %rd23;
	// begin inline asm
	st.global.cs.v4.u32 [%rd19], {%r32,%r33,%r34,%r35};
	// end inline asm
	add.s32 	%r65, %r65, %r2;
	cvt.u32.u64 	%r52, %rd3;
	add.s32 	%r53, %r65, %r52;
	setp.lt.u32 	%p3, %r53, %r5;
	@%p3 bra 	$L__BB0_4;

$L__BB0_5:
	setp.ge.u32 	%p4, %r65, %r5;
	@%p4 bra 	$L__BB0_7;

$L__BB0_6:
	mul.wide.u32 	%rd26, %r65, 16;
	add.s64 	%rd25, %rd5, %rd26;
	add.s64 	%rd24, %rd6, %rd26;
	// begin inline asm
	ld.global.cs.v4.u32 {%r54,%r55,%r56,%r57}, [%rd24];
	// end inline asm
	// begin inline asm
	st.global.cs.v4.u32 [%rd25], {%r54,%r55,%r56,%r57};
	// end inline asm
	cvt.u32.u64 	%r62, %rd1;
	add.s32 	%r65, %r65, %r62;
	setp.lt.u32 	%p5, %r65, %r5;
	@%p5 bra 	$L__BB0_6;

$L__BB0_7:
	add.s32 	%r63, %r63, %r3;
	setp.lt.u32 	%p6, %r63, %r14;
	@%p6 bra 	$L__BB0_2;

$L__BB0_8:
	ret;

}
	// .globl	copy_pages
.visible .entry copy_pages(
	.param .align 8 .b8 copy_pages_param_0[640],
	.param .u64 copy_pages_param_1
)
.maxntid 512, 1, 1
{
	.reg .pred 	%p<9>;
	.reg .b32 	%r<72>;
	.reg .b64 	%rd<69>;


	mov.b64 	%rd23, copy_pages_param_0;
	ld.param.u64 	%rd24, [copy_pages_param_1];
	mov.u32 	%r14, %ctaid.x;
	cvt.u64.u32 	%rd62, %r14;
	setp.ge.u64 	%p1, %rd62, %rd24;
	@%p1 bra 	$L__BB1_10;

	mov.u32 	%r16, %ntid.x;
	mul.lo.s32 	%r17, %r16, 3;
	cvt.u64.u32 	%rd2, %r16;
	shl.b32 	%r18, %r16, 1;
	cvt.u64.u32 	%rd3, %r18;
	cvt.u64.u32 	%rd4, %r17;
	mov.u32 	%r68, 0;
	mov.u64 	%rd66, 0;
	shl.b64 	%rd56, %rd3, 4;

$L__BB1_2:
	cvt.u64.u32 	%rd68, %r68;
	mul.wide.u32 	%rd27, %r68, 40;
	add.s64 	%rd28, %rd23, %rd27;
	ld.param.u64 	%rd64, [%rd28+24];
	sub.s64 	%rd67, %rd62, %rd66;
	setp.lt.u64 	%p2, %rd67, %rd64;
	@%p2 bra 	$L__BB1_4;

$L__BB1_3:
	add.s64 	%rd66, %rd64, %rd66;
	sub.s64 	%rd67, %rd62, %rd66;
	add.s32 	%r68, %r68, 1;
	cvt.u64.u32 	%rd68, %r68;
	mul.wide.u32 	%rd29, %r68, 40;
	add.s64 	%rd30, %rd23, %rd29;
	ld.param.u64 	%rd64, [%rd30+24];
	setp.ge.u64 	%p3, %rd67, %rd64;
	@%p3 bra 	$L__BB1_3;

$L__BB1_4:
	mul.lo.s64 	%rd32, %rd68, 40;
	add.s64 	%rd33, %rd23, %rd32;
	ld.param.u64 	%rd34, [%rd33];
	cvta.to.global.u64 	%rd35, %rd34;
	shl.b64 	%rd36, %rd67, 4;
	add.s64 	%rd37, %rd35, %rd36;
	ld.global.v2.u64 	{%rd38, %rd39}, [%rd37];
	ld.param.u64 	%rd42, [%rd33+8];
	add.s64 	%rd20, %rd42, %rd39;
	ld.param.u64 	%rd43, [%rd33+16];
	add.s64 	%rd21, %rd43, %rd38;
	ld.param.u64 	%rd44, [%rd33+32];
	shr.u64 	%rd45, %rd44, 4;
	cvt.u32.u64 	%r5, %rd45;
	mov.u32 	%r70, %tid.x;
	mad.lo.s32 	%r20, %r16, 3, %r70;
	setp.ge.u32 	%p4, %r20, %r5;
	@%p4 bra 	$L__BB1_7;

	mov.u32 	%r70, %tid.x;
	shl.b32 	%r8, %r16, 2;

$L__BB1_6:
	mul.wide.u32 	%rd54, %r70, 16;
	add.s64 	%rd46, %rd21, %rd54;
	// begin inline asm
	ld.global.cs.v4.u32 {%r22,%r23,%r24,%r25}, [%rd46];
	// end inline asm
	shl.b64 	%rd55, %rd2, 4;
	add.s64 	%rd47, %rd46, %rd55;
	// begin inline asm
	ld.global.cs.v4.u32 {%r26,%r27,%r28,%r29}, [%rd47];
	// end inline asm
	add.s64 	%rd48, %rd46, %rd56;
	// begin inline asm
	ld.global.cs.v4.u32 {%r30,%r31,%r32,%r33}, [%rd48];
	// end inline asm
	shl.b64 	%rd57, %rd4, 4;
	add.s64 	%rd49, %rd46, %rd57;
	// begin inline asm
	ld.global.cs.v4.u32 {%r34,%r35,%r36,%r37}, [%rd49];
	// end inline asm
	add.s64 	%rd50, %rd20, %rd54;
	// begin inline asm
	st.global.cs.v4.u32 [%rd50], {%r22,%r23,%r24,%r25};
	// end inline asm
	add.s64 	%rd51, %rd50, %rd55;
	// begin inline asm
	st.global.cs.v4.u32 [%rd51], {%r26,%r27,%r28,%r29};
	// end inline asm
	add.s64 	%rd52, %rd50, %rd56;
	// begin inline asm
	st.global.cs.v4.u32 [%rd52], {%r30,%r31,%r32,%r33};
	// end inline asm
	add.s64 	%rd53, %rd50, %rd57;
	// begin inline asm
	st.global.cs.v4.u32 [%rd53], {%r34,%r35,%r36,%r37};
	// end inline asm
	add.s32 	%r70, %r70, %r8;
	cvt.u32.u64 	%r54, %rd4;
	add.s32 	%r55, %r70, %r54;
	setp.lt.u32 	%p5, %r55, %r5;
	@%p5 bra 	$L__BB1_6;

$L__BB1_7:
	setp.ge.u32 	%p6, %r70, %r5;
	@%p6 bra 	$L__BB1_9;

$L__BB1_8:
	mul.wide.u32 	%rd60, %r70, 16;
	add.s64 	%rd59, %rd20, %rd60;
	add.s64 	%rd58, %rd21, %rd60;
	// begin inline asm
	ld.global.cs.v4.u32 {%r56,%r57,%r58,%r59}, [%rd58];
	// end inline asm
	// begin inline asm
	st.global.cs.v4.u32 [%rd59], {%r56,%r57,%r58,%r59};
	// end inline asm
	cvt.u32.u64 	%r64, %rd2;
	add.s32 	%r70, %r70, %r64;
	setp.lt.u32 	%p7, %r70, %r5;
	@%p7 bra 	$L__BB1_8;

$L__BB1_9:
	mov.u32 	%r65, %nctaid.x;
	cvt.u64.u32 	%rd61, %r65;
	add.s64 	%rd62, %rd62, %rd61;
	setp.lt.u64 	%p8, %rd62, %rd24;
	@%p8 bra 	$L__BB1_2;

$L__BB1_10:
	ret;

}
)PTX";

}  // namespace asyncfabric::cuda
